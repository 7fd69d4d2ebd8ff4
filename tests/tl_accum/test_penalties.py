"""When a penalty on the weights is told, and what is no evidence of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tl_accum import check_accumulation_equivalent
from tl_accum._rules.terms import _multiple
from tl_core import TrainingSetup

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]

IDS = torch.randint(0, 500, (16, 4), generator=torch.Generator().manual_seed(8))
CLASSES = torch.tensor([0, 0, 1, 2, 2, 2, 1, 0, 0, 2, 1, 1, 1, 0, 2, 0])


class Texts(nn.Module):
    """Far more weights than gradients: the length of the weights' signs is 180, that of the gradients below 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(500, 64), nn.Linear(64, 32), nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(ids).mean(1)).tanh())


def make_setup() -> TrainingSetup:
    model = Texts()
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def found(loss_of: Loss, *, divided: bool = False) -> list[str]:
    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = loss_of(setup.model, *batch)
            (loss / k if divided else loss).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss.detach()

        return step

    return list(map(str, check_accumulation_equivalent(make_setup, (IDS, CLASSES), make_step).findings))


def by_class(model: nn.Module, ids: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids), classes, weight=torch.tensor([1.0, 2.0, 4.0]))


def contrasted(model: nn.Module, ids: Tensor, classes: Tensor) -> Tensor:
    out = model(ids)
    return 0.1 * functional.cross_entropy(out @ out.T, torch.arange(len(out)))


FIGURES = "0.222, 0.306, 0.25, 0.222"


@pytest.mark.parametrize("divided", [False, True], ids=["added up", "averaged"])
def test_weighted_means_are_no_penalty(divided: bool) -> None:
    """Whatever the small gradients lack is small beside the weights' signs: that makes it no multiple of them."""
    weighs = "1/4" if divided else "1"
    (finding,) = found(by_class, divided=divided)
    assert finding.startswith(
        f"[mean-of-means] cycle 1 of 2: each micro-batch weighs {weighs} in the accumulated gradients, and {FIGURES} "
        "in the full batch's; norm "
    )
    assert ("nor are these means divided by the 4 accumulation steps" in finding) is not divided


def test_coupled_examples_are_no_penalty() -> None:
    """Also where no weighing of the micro-batches explains the rest."""
    (finding,) = found(contrasted)
    assert "penalty" not in finding
    assert not finding.startswith("[constant-term]")


def test_a_penalty_on_many_weights_is_told() -> None:
    """The real one, beside the same small gradients: added to each micro-batch's part of a sum."""

    def penalised(model: nn.Module, ids: Tensor, classes: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(ids), classes, reduction="sum") / 16
        return loss + 1e-3 * sum(parameter.abs().sum() for parameter in model.parameters())

    (finding,) = found(penalised)
    assert finding.startswith("[constant-term] cycle 1 of 2: the accumulated gradients hold 4 times a term ")
    assert "(its gradient is 0.001 times the weights' signs: an L1 penalty)" in finding


SHAPE = {"weight": torch.tensor([1.0, -1.0, 1.0]), "bias": torch.tensor([1.0, -1.0])}
ERRORS = {"weight": 1e-6, "bias": 1e-6}


def times(factor: float, **changed: Tensor) -> dict[str, Tensor]:
    return {name: factor * value for name, value in SHAPE.items()} | changed


def test_a_multiple_is_told_where_it_is_plain() -> None:
    """However small the factor is, where rounding is smaller by far."""
    assert _multiple(times(0.5), SHAPE, ERRORS) == pytest.approx(0.5)
    assert _multiple(times(2e-5), SHAPE, ERRORS) == pytest.approx(2e-5)


@pytest.mark.parametrize(
    ("term", "shape", "errors"),
    [
        (times(1e-5), SHAPE, ERRORS),
        (times(0.5, bias=torch.tensor([0.5, -0.497])), SHAPE, ERRORS),
        (times(0.5, bias=torch.tensor([0.0, 0.0])), SHAPE, ERRORS),
        ({"bias": 0.5 * SHAPE["bias"]}, {"bias": SHAPE["bias"]}, ERRORS),
        (times(0.5), times(0.0), ERRORS),
        (torch.full((4,), 1e-3), torch.full((4,), 1e3), 1.0),
    ],
    ids=[
        "no more than ten times what rounding does",
        "off by more than rounding in one parameter",
        "not in one parameter",
        "two elements",
        "weights of 0",
        "what may be off is larger",
    ],
)
def test_no_multiple_is_told_otherwise(term: Any, shape: Any, errors: Any) -> None:
    """Each demand by itself."""
    if isinstance(term, Tensor):
        term, shape, errors = {"weight": term}, {"weight": shape}, {"weight": errors}
    assert _multiple(term, shape, errors) is None
