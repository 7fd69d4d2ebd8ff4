"""What counts as a difference: of small gradients, in low precision, above the loop's own noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_accum import AccumulationReport, assert_accumulation_equivalent, check_accumulation_equivalent
from tl_accum._tolerance import Bounds, may_use_tf32
from tl_core import NotJudged, Tolerances, TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
PASSED = "Gradient accumulation: passed"


def make_setup() -> Any:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def loop(loss_fn: Callable[[nn.Module, Tensor], Tensor], *, excess: float = 1.0) -> Callable[[int], Any]:
    """Make a loop whose losses are too large by a factor where they are accumulated."""

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = loss_fn(setup.model, batch)
            (loss / k * (excess if k > 1 else 1.0)).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss.detach()

        return step

    return make_step


def check(loss_fn: Callable[[nn.Module, Tensor], Tensor], *, excess: float = 1.0, **options: Any) -> AccumulationReport:
    return check_accumulation_equivalent(make_setup, X, loop(loss_fn, excess=excess), **options)


@pytest.mark.parametrize("scale", [1e6, 1.0, 1e-4, 1e-8, 1e-12])
def test_small_gradients_are_not_hidden_by_the_absolute_tolerance(scale: float) -> None:
    """The default atol is lowered with the gradients: a factor of 1.01 shows whatever they are."""

    def scaled(model: nn.Module, batch: Tensor) -> Tensor:
        return squared(model, batch) * scale

    assert str(check(scaled)) == PASSED
    (finding,) = check(scaled, excess=1.01).findings
    assert finding.rule == "wrong-loss-scale"


def test_a_given_tolerance_is_used_as_it_is() -> None:
    """Absolute or relative: differences below it are none."""
    assert not check(squared, excess=1.01).ok
    assert check(squared, excess=1.01, atol=0.1).ok
    assert check(squared, excess=1.01, rtol=0.05).ok
    assert not check(squared, excess=1.01, rtol=0.005, atol=0.0).ok
    assert not check(lambda m, b: squared(m, b) * 1e-6, excess=1.01, atol=1e-11).ok
    assert check(lambda m, b: squared(m, b) * 1e-6, excess=1.01, atol=1e-6).ok


def test_the_default_is_that_of_the_projects_tolerances() -> None:
    """By their name, and for a device."""
    tolerance = Tolerances().get("grad_accumulation", "cpu")
    assert (tolerance.rtol, tolerance.atol) == (1e-4, 1e-6)


def autocast(dtype: torch.dtype) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            out = model(batch)
        return out.float().square().mean()

    return loss_fn


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, "0.031"), (torch.float16, "0.0039")])
def test_low_precision_widens_the_tolerance_and_says_so(dtype: torch.dtype, share: str) -> None:
    """A correct loop passes with a note; a missing division is found."""
    report = check(autocast(dtype))
    assert report.ok
    (note,) = report.notes
    name = str(dtype).removeprefix("torch.")
    assert str(note) == (
        f"[low-precision] the loop computes in {name}: gradients were compared to {share} of each parameter's largest\n"
        "  fix: check it in float32 too, where smaller differences show"
    )
    assert [finding.rule for finding in check(autocast(dtype), excess=4.0).findings] == ["loss-not-divided"]


def test_a_model_in_low_precision_passes() -> None:
    """Weights and gradients in bfloat16."""

    def low() -> Any:
        model, _ = make_setup()
        model = model.bfloat16()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    report = check_accumulation_equivalent(low, X.bfloat16(), loop(lambda m, b: m(b).float().square().mean()))
    assert (report.ok, [note.rule for note in report.notes]) == (True, ["low-precision"])


def test_double_precision_does_not_widen_anything() -> None:
    """No note, and the same tolerance."""

    def double() -> Any:
        model, _ = make_setup()
        model = model.double()
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    assert str(check_accumulation_equivalent(double, X.double(), loop(squared))) == PASSED


def noisy(size: float) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return squared(model, batch + size * torch.randn_like(batch))

    return loss_fn


def test_the_loops_own_noise_is_measured_used_and_said() -> None:
    """A loop that draws random numbers differs from itself: no more than that is allowed."""
    report = check(noisy(1e-3))
    assert report.ok
    assert 1e-4 < report.noise < 1e-1
    (note,) = report.notes
    assert note.rule == "noise"
    assert f"by up to {report.noise:.3g} of its largest gradient, since the step draws random numbers" in note.seen


def test_a_mistake_larger_than_the_noise_is_found() -> None:
    """With the same noise, a missing division."""
    report = check(noisy(1e-3), excess=4.0)
    assert [finding.rule for finding in report.findings] == ["loss-not-divided"]
    assert [note.rule for note in report.notes] == ["noise"]


def test_a_loop_that_repeats_exactly_has_no_noise() -> None:
    """Also where it fails, and the noise was measured."""
    assert check(squared).noise == 0.0
    report = check(squared, excess=4.0)
    assert (report.noise, report.notes) == (0.0, ())


def test_a_loop_of_nothing_but_noise_is_not_judged() -> None:
    """Neither passed nor failed: NotJudged says why."""

    def random_sign(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * torch.randn(len(batch), 1)).mean()

    with pytest.raises(NotJudged) as caught:
        assert_accumulation_equivalent(make_setup, X, loop(random_sign))
    report = caught.value.report
    (note,) = report.notes
    assert (note.rule, report.findings, report.judged) == ("not-judged", (), False)
    assert f"by up to {report.noise:.3g} of its largest gradient" in note.seen


@pytest.mark.parametrize(("factor", "why"), [(float("inf"), "are not finite"), (0.0, "are all 0")])
def test_gradients_that_tell_nothing_are_not_judged(factor: float, why: str) -> None:
    """Infinite ones, and ones that are all 0: no silent pass."""
    report = check(lambda model, batch: squared(model, batch) * factor)
    assert (report.ok, report.judged, report.findings) == (False, False, ())
    (note,) = report.notes
    assert (note.rule, note.seen) == ("not-judged", f"the full batch's gradients {why}: they could not be compared")


def test_updates_that_no_optimizer_makes_are_not_judged() -> None:
    """Weights that a step moves by hand: whether it does so rightly cannot be seen."""

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = squared(setup.model, batch)
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                for parameter in setup.model.parameters():
                    parameter.data.sub_(0.1 * parameter.grad)
                    parameter.grad = None
            return loss.detach()

        return step

    report = check_accumulation_equivalent(make_setup, X, make_step)
    assert str(report) == (
        "Gradient accumulation: could not judge\n\nNotes:\n"
        "[not-judged] no optimizer of the setup stepped, and the weights moved all the same: only what optimizers "
        "update can be compared\n"
        "  fix: put the optimizer that makes the updates into the setup, or write them as an optimizer's step()"
    )


@pytest.mark.parametrize("options", [{"lr": 1e-2}, {"lr": 1e-1, "eps": 1e-16}, {"lr": 1e-2, "fused": True}], ids=str)
def test_a_gradient_of_nothing_but_rounding_does_not_alarm(options: dict[str, Any]) -> None:
    """A key bias has a gradient of 0: what rounding leaves of it, Adam turns into steps of a whole learning rate."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return self.head(self.attention(h, h, h)[0])

    def build() -> Any:
        model = Attention()
        return model, torch.optim.Adam(model.parameters(), **options)

    batch = torch.randn(16, 5, 6, generator=torch.Generator().manual_seed(1))
    assert str(check_accumulation_equivalent(build, batch, loop(squared), cycles=4)) == PASSED


def test_bounds_are_relative_to_each_parameters_largest_gradient() -> None:
    """And to a hundredth of the largest of all, where that is more."""
    gradients = {"large": torch.tensor([1.0, -10.0]), "small": torch.tensor([1e-6])}
    allowed = Bounds(1e-3, 1e-8).of(gradients)
    assert allowed == pytest.approx({"large": 1e-2 + 1e-8, "small": 1e-4 + 1e-8})


def test_an_implied_absolute_tolerance_is_never_more_than_the_relative_one() -> None:
    """A given one is kept whatever the gradients are."""
    tiny = {"x": torch.tensor([1e-9])}
    assert Bounds(1e-3, 1e-6).of(tiny) == pytest.approx({"x": 2e-12}, rel=1e-6, abs=0.0)
    assert Bounds(1e-3, 1e-6, exact_atol=True).of(tiny) == pytest.approx({"x": 1e-6 + 1e-12}, rel=1e-6, abs=0.0)


def test_the_floor_is_allowed_three_times() -> None:
    """Beside the tolerance, for the parameter that it was measured for."""
    gradients = {"x": torch.tensor([1.0]), "y": torch.tensor([1.0])}
    allowed = Bounds(1e-3, 0.0, floor={"x": 0.1}).of(gradients)
    assert allowed == pytest.approx({"x": 0.301, "y": 0.001})


def test_low_precision_never_narrows() -> None:
    """4 units in the last place, or what was given."""
    assert Bounds(1e-4, 0.0, low=torch.float16).relative == 4 * 2.0**-10
    assert Bounds(1e-1, 0.0, low=torch.float16).relative == 1e-1
    assert Bounds(1e-4, 0.0).relative == 1e-4


def test_no_gradients_have_no_bounds() -> None:
    """An optimizer without gradients is no error."""
    assert Bounds(1e-4, 1e-6).of({}) == {}
    assert Bounds(1e-4, 1e-6).length({}) == 1e-3


def test_tf32_widens_the_tolerance():
    """Products in TF32 are as coarse as its ten bits, whatever rtol is asked for below that."""
    assert Bounds(1e-4, 1e-6, tf32=True).relative == 4 * 2.0**-10
    assert Bounds(1e-2, 1e-6, tf32=True).relative == 1e-2
    assert Bounds(1e-4, 1e-6).relative == 1e-4


def test_tf32_is_a_matter_of_gpus():
    """On the CPU there is none; on CUDA cudnn's default allows it, and both flags off rule it out."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    try:
        cudnn.allow_tf32 = True
        assert not may_use_tf32("cpu")
        assert may_use_tf32("cuda")
        cudnn.allow_tf32 = matmul.allow_tf32 = False
        assert not may_use_tf32("cuda:0")
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before
