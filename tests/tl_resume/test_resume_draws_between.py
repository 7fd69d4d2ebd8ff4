"""Random numbers that are drawn between loading and the step's forward pass, as a loader's new iterator does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tl_core import TrainingSetup
from tl_resume import check_resume_equivalent

DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))


def make_setup(own_generator: bool = False, dropout: float = 0.5) -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(0) if own_generator else None
    setup.loader = DataLoader(DATA, batch_size=4, generator=generator)
    setup.batches = iter(setup.loader)
    return setup


def train(setup: Any, _: int) -> torch.Tensor:
    (inputs,) = next(setup.batches)
    setup.optimizer.zero_grad()
    loss = (setup.model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: Any, path: Path) -> None:
    state = {"model": setup.model.state_dict(), "rng": torch.get_rng_state(), "step": setup.step_index}
    torch.save(state, path)


def load(setup: Any, path: Path) -> None:
    state = torch.load(path)
    setup.model.load_state_dict(state["model"])
    setup.batches = rest(setup.loader, state["step"])
    torch.set_rng_state(state["rng"])


def rest(loader: DataLoader[Any], step: int) -> Iterator[Any]:
    """Begin an iterator when the first batch is asked for: the generators have been restored by then."""
    yield from itertools.islice(loader, step, None)


def check(make: Callable[[], TrainingSetup]) -> Any:
    return check_resume_equivalent(make, lambda index: index, train, save=save, load=load, steps=6, resume_at=3)


def test_a_generator_that_an_iterator_draws_from_after_loading_is_named() -> None:
    """The module that draws other numbers for the same input is named, and what draws in between."""
    (finding,) = check(make_setup).findings
    assert str(finding) == (
        "[rng-not-restored] the runs part at step 3: loss 2.28851 resumed, 3.92425 without interruption; in step 3, "
        "module 1 is the first that gives something else for the same input: it draws from torch's generator, in "
        "another state than without interruption; right after loading, that was as saved\n"
        "  cause: something draws random numbers between load() and that module's call in one of the runs, and not in "
        "the other; the iterator of a DataLoader does so when it begins, one number for its workers\n"
        "  fix: give the loader a generator of its own, DataLoader(..., generator=torch.Generator()), or restore the "
        "random states when its iterator has begun"
    )


def test_a_loader_with_a_generator_of_its_own_passes() -> None:
    """The change that the finding asks for mends it."""
    assert check(lambda: make_setup(own_generator=True)).ok


def test_a_model_that_draws_nothing_passes() -> None:
    """The number that the iterator draws is nobody's."""
    assert check(lambda: make_setup(dropout=0.0)).ok


class Counting(nn.Module):
    """Draws a number that it does not use, and gives what depends on a count that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = itertools.count(1)
        self.falling = (1.0 / number for number in self.counts)  # a generator: nothing can read its place

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return inputs * next(self.falling)


def test_a_module_that_draws_from_a_restored_generator_is_not_suspected() -> None:
    """Where the generators stand alike, something else makes the difference."""

    def make() -> TrainingSetup:
        setup = make_setup(own_generator=True)
        setup.model[1] = Counting()
        return setup

    (finding,) = check(make).findings
    assert finding.rule == "resume-diverges"
    assert "in step 3, module 1 is the first that gives something else for the same input;" in finding.seen
