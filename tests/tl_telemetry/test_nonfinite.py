"""Where values that are not finite are said to come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tl_core import Finding, TrainingSetup
from tl_telemetry import run_training
from tl_telemetry._replay import first_nonfinite

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)
X_WITH_NAN = torch.where(torch.arange(96).reshape(16, 6) == 20, torch.nan, X)


def finding(
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    data: Any = (X, Y),
    lr: float = 0.05,
    dtype: torch.dtype = torch.float32,
    steps: int = 6,
    spoil: bool = False,
) -> Finding:
    """Train a linear model and return its one finding; ``spoil`` puts NaN into its bias first."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1).to(dtype)
        if spoil:
            model.bias.data.fill_(torch.nan)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = loss_fn(setup.model(batch[0].to(dtype)), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    (found,) = run_training(make_setup, data, step, steps=steps).check().findings
    assert found.rule == "non-finite"
    return found


def mse(made: Tensor, y: Tensor) -> Tensor:
    return (made - y).square().mean()


def masked_everywhere(made: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones(16, 16, dtype=torch.bool).triu()
    return mse((made @ made.T).masked_fill(mask, -torch.inf).softmax(1) @ made, y)


FIRST = "in step 0, before anything else did"
# what is tried -> (the loss, the cause with {line} for a line of this file)
CAUSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "log of 0": (
        lambda made, y: -(made * 0).log().mean(),
        f"log at {{line}} turned finite values into Inf {FIRST}: the logarithm of 0; MulBackward0 (the backward of "
        "{line}) then made NaN of infinities",
    ),
    "log of negative": (
        lambda made, y: -(made * 0 - 1).log().mean(),
        f"log at {{line}} turned finite values into NaN {FIRST}: the logarithm of a negative number",
    ),
    "0 / 0": (
        lambda made, y: ((made - made) / (made - made)).mean(),
        f"div at {{line}} turned finite values into NaN {FIRST}: a division by 0, or by almost 0",
    ),
    "exp": (
        lambda made, y: ((made * 300).exp() / (made * 300).exp().sum()).mean(),
        f"exp at {{line}} turned finite values into Inf {FIRST}: the result is too large; div at {{line}} then made "
        "NaN of infinities",
    ),
    "all ignored": (
        lambda made, y: F.cross_entropy(made.expand(-1, 3), torch.full((16,), -100)),
        f"nll_loss_forward at {{line}} turned finite values into NaN {FIRST}: no target is left to average over, "
        "all are ignore_index",
    ),
    "a mask times -inf": (
        lambda made, y: (made + (made > 0) * -torch.inf).softmax(0).mean(),
        f"mul at {{line}} turned finite values into NaN {FIRST}: one of its arguments is the number NaN or Inf",
    ),
    "mean of nothing": (
        lambda made, y: made[:0].mean(),
        f"mean at {{line}} turned finite values into NaN {FIRST}: it had no element to work with",
    ),
    "spread of one": (
        lambda made, y: made[0].std(),
        f"std at {{line}} turned finite values into NaN {FIRST}: fewer than two values have no such spread",
    ),
    "root of 0": (
        lambda made, y: ((made - made.detach()) ** 0.5).mean(),
        f"PowBackward0 (the backward of {{line}}) turned finite values into Inf {FIRST}: its slope is infinite at 0 "
        "for an exponent below 1, or the result is too large; AddmmBackward0 (the backward of {model}) "
        "then made NaN of infinities",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.filterwarnings("ignore:std:UserWarning")
def test_operation_is_named(name: str) -> None:
    """The operation that first made a non-finite value is named with its line and, where it is certain, its reason."""
    loss_fn, cause = CAUSES[name]
    line = f"test_nonfinite.py:{loss_fn.__code__.co_firstlineno}"
    model = f"test_nonfinite.py:{finding.__code__.co_firstlineno + 19}"
    assert finding(loss_fn).cause == cause.format(line=line, model=model)


def test_masked_row_is_told_from_a_made_infinity() -> None:
    """Infinities of a mask are blamed on no operation; the one that makes NaN of a whole masked row is named."""
    line = masked_everywhere.__code__.co_firstlineno + 2
    assert finding(masked_everywhere).cause == (
        f"_softmax at test_nonfinite.py:{line} made NaN of infinities in step 0: a row that masks everything leaves "
        "nothing to normalise. The infinities were put there on purpose or were given, as in a mask of -inf"
    )


def half_masked(made: Tensor) -> Tensor:
    return made.expand(-1, 4).masked_fill(torch.arange(4) > 1, -torch.inf)


# what is tried -> (the loss, the operation, how it makes NaN, how the fix begins)
TURNS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, str, str]] = {
    "an entropy": (
        lambda made, y: (half_masked(made).softmax(1) * half_masked(made).log_softmax(1)).sum(),
        "mul",
        "a factor of 0 meets one of infinity, as in `p * p.log()` where p is 0",
        "take the infinity out of the factor, not out of the product",
    ),
    "a difference": (
        lambda made, y: (half_masked(made) - half_masked(made)).sum(),
        "sub",
        "infinities of opposite signs meet in a sum, or equal ones in a difference",
        "keep one of them finite",
    ),
    "a quotient": (
        lambda made, y: (half_masked(made) / half_masked(made)).sum(),
        "div",
        "an infinity is divided by an infinity",
        "keep the divisor finite",
    ),
    "a product of matrices": (
        lambda made, y: (half_masked(made).T @ (half_masked(made) * 1.0).nan_to_num(0.0, 0.0, 0.0)).sum(),
        "mm",
        "0 times infinity, or infinities of opposite signs in the sum of the products",
        "give it finite values",
    ),
    "a sine": (
        lambda made, y: half_masked(made).sin().sum(),
        "sin",
        "it is not defined for them",
        "look at where its infinite inputs come from",
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_nan_of_infinities_is_explained_by_the_operation(name: str) -> None:
    """How infinities that were put there became NaN is said of the operation that did it, with a fix for that."""
    loss_fn, operation, how, fix = TURNS[name]
    found = finding(loss_fn)
    line = loss_fn.__code__.co_firstlineno
    assert found.cause == (
        f"{operation} at test_nonfinite.py:{line} made NaN of infinities in step 0: {how}. The infinities were put "
        "there on purpose or were given, as in a mask of -inf"
    )
    assert found.fix.startswith(fix)


def test_entropy_that_is_masked_in_its_factor() -> None:
    """The fix that a masked entropy is told of works: its loss and gradients are finite."""

    def entropy(made: Tensor, y: Tensor) -> Tensor:
        log_p = half_masked(made).log_softmax(1)
        p = log_p.exp()
        return (p * log_p.masked_fill(p == 0, 0.0)).sum() + mse(made, y)

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return entropy(model(batch[0]), batch[1])

    assert run_training(make_setup, (X, Y), loss_fn=loss_fn, steps=6).check().findings == ()


def test_data_is_blamed_for_its_own_nan() -> None:
    """NaN in the batch is named with its place, in the step that had it first."""
    found = finding(mse, data=[(X, Y), (X, Y), (X_WITH_NAN, Y)])
    assert found.cause == "the data: in step 2, batch[0] holds 1 NaN in 96 elements"
    assert found.seen.startswith("the loss was not finite in steps 2-5 (loss nan); gradients that were not finite were")


def test_divergence_is_told_from_a_bad_operation() -> None:
    """Values that overflow after growing by orders of magnitude are the end of a divergence."""
    line = mse.__code__.co_firstlineno + 1
    assert finding(mse, lr=50.0, steps=40).cause == (
        "the loop diverges: the loss had grown from 2.62 to 3.47e+35 in the steps before step 9, in which values "
        f"overflowed (first in pow at test_nonfinite.py:{line})"
    )


def test_masked_result_still_spoils_the_gradient() -> None:
    """A result that torch.where leaves out of the loss is named when its slope makes the gradient NaN."""
    loss_fn: Callable[[Tensor, Tensor], Tensor] = lambda made, y: torch.where(made > 0, made.sqrt(), 0.0).mean()  # noqa: E731
    assert finding(loss_fn).cause == (
        f"sqrt at test_nonfinite.py:{loss_fn.__code__.co_firstlineno} turned finite values into NaN in step 0: "
        "the square root of a negative number. The loss does not show it (torch.where or a mask chose other values), "
        "but the gradient passes through it all the same, and 0 * NaN is NaN"
    )


def test_update_is_blamed_for_what_it_makes_of_finite_gradients() -> None:
    """An optimizer whose eps vanishes in float16 divides by 0: its arithmetic is the cause, in its first update."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1).half()
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.001, foreach=False))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = 0.001 * mse(setup.model(0.01 * batch[0].half()), batch[1].half())
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    (found,) = run_training(make_setup, (X, Y), step, steps=4).check().findings
    assert found.seen.startswith(
        "the update of 'optimizer' in step 0 made all 2 parameters NaN or Inf, although its gradients were finite; "
    )
    assert found.cause == (
        "the arithmetic of Adam itself: its update in step 0 made NaN or Inf of finite gradients; in float16, "
        "its eps of 1e-08 rounds to 0, and it divides by 0"
    )
    assert found.fix == "keep the weights in float32 and compute in low precision under torch.autocast, or raise eps"
    assert found.evidence == {"first_step": 0}


class _Root(torch.optim.Optimizer):
    """Steps by the square root of the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad.sqrt())


def test_update_of_a_written_optimizer_is_blamed() -> None:
    """A NaN that an optimizer of one's own makes is told from one of the loss."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, _Root(model.parameters()))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = mse(setup.model(batch[0]), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    (found,) = run_training(make_setup, (X, Y), step, steps=4).check().findings
    assert found.cause == (
        "the arithmetic of _Root itself: its update in step 0 made NaN or Inf of finite gradients (weights in float32)"
    )


def test_float16_is_told_from_float32() -> None:
    """An overflow of float16 is named as one."""
    found = finding(lambda made, y: (made * 60000.0 * 60000.0).mean(), dtype=torch.float16)
    assert ": the result is too large (float16 ends at 65504)" in found.cause
    assert found.fix == "compute this part in float32, or use bfloat16"


def test_gradient_hook_is_named() -> None:
    """A hook that spoils a gradient is named by its own line."""

    def spoil(grad: Tensor) -> Tensor:
        return grad / (grad - grad)

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        model.bias.register_hook(spoil)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = mse(setup.model(batch[0]), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    (found,) = run_training(make_setup, (X, Y), step, steps=4).check().findings
    line = spoil.__code__.co_firstlineno + 1
    assert found.cause == (
        f"div at test_nonfinite.py:{line} (a gradient hook) turned finite values into Inf in step 0, before anything "
        "else did: a division by 0, or by almost 0"
    )


def test_weights_that_begin_as_nan_are_named() -> None:
    """Parameters that held NaN before the first step are the cause."""
    assert finding(mse, spoil=True).cause == "bias held NaN or Inf before the first step"


def test_repeated_run_of_healthy_steps_names_nothing() -> None:
    """Repeating a step without non-finite values finds neither an operation nor data."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        loss = mse(setup.model(batch[0]), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    origin = first_nonfinite(make_setup, (X, Y), step, until=2, device="cpu", seed=0)
    assert (origin.batch, origin.made, origin.turned) == ("", (), ())


@pytest.mark.parametrize(("every", "found"), [(2, True), (4, False)])
def test_guard_that_skips_is_left_alone_while_it_is_the_exception(every: int, found: bool) -> None:
    """A guard that skips every fourth batch works; one that skips every second one hides bad data."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = mse(setup.model(batch[0]), batch[1])
        if loss.isfinite():
            loss.backward()
            setup.optimizer.step()
        return loss.detach()

    data = [(X_WITH_NAN if index % every == 1 else X, Y) for index in range(8)]
    findings = run_training(make_setup, data, step, steps=8).check().findings
    assert [finding.cause for finding in findings] == (
        ["the data: in step 1, batch[0] holds 1 NaN in 96 elements"] if found else []
    )
