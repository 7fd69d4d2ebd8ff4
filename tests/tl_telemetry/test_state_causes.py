"""Rules about state beside the weights, on what their own cases do not show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tl_core import Finding, TrainingSetup
from tl_telemetry import run_training

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

Step = Callable[[TrainingSetup, Any], Any]


def only_finding(make_setup: Callable[[], TrainingSetup], step: Step, steps: int = 8) -> Finding:
    (finding,) = run_training(make_setup, (X, Y), step, steps=steps).check().findings
    return finding


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())


def test_statistics_of_a_teacher_in_the_state() -> None:
    """BatchNorm of a frozen module beside the model is seen, and named by its place in the setup."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 8)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.teacher = encoder().requires_grad_(False)
        return setup

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        with torch.no_grad():
            target = setup.teacher(batch[0])
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - target).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    finding = only_finding(make_setup, step)
    assert finding.rule == "frozen-buffer-moved"
    assert finding.parameters == (
        "teacher.1.running_mean",
        "teacher.1.running_var",
        "teacher.1.num_batches_tracked",
    )


def test_statistics_of_a_frozen_part_that_is_fed_by_a_trained_one() -> None:
    """A wholly frozen part in training mode is seen although what flows in is trained (a perceptual loss)."""

    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 6), encoder().requires_grad_(False))
        return TrainingSetup(model, torch.optim.SGD(model[0].parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    assert only_finding(make_setup, step).parameters[0] == "1.1.running_mean"


def keeps(what: str) -> tuple[Callable[[], TrainingSetup], Step]:
    """Return a loop that keeps with their history: the outputs, an average of the features, a hidden state, a score."""

    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.outputs, setup.center = deque(maxlen=4 if what == "last scores" else None), torch.zeros(8)
        setup.hidden = torch.zeros(16, 8)
        return setup

    def step(setup: TrainingSetup, batch: Any) -> float:
        setup.optimizer.zero_grad()
        features = setup.model[:2](batch[0])
        if what == "features":
            setup.center = 0.9 * setup.center + 0.1 * features.mean(0)
        made = setup.model[2](features - setup.center.detach())
        if what == "outputs":
            setup.outputs.append(made)
        loss = (made - batch[1]).square().mean()
        if "hidden" in what:
            if what == "hidden state that is cut" and setup.step_index % 3 == 0:
                setup.hidden = setup.hidden.detach()
            setup.hidden = 0.5 * setup.hidden + features
            loss = loss + setup.hidden.square().mean()
        loss.backward(retain_graph="hidden" in what)
        setup.optimizer.step()
        if "score" in what:
            with torch.set_grad_enabled(what != "scores without grad"):
                setup.outputs.append((setup.model(batch[0]) - batch[1]).abs().mean())
        return loss.item()

    return make_setup, step


@pytest.mark.parametrize("what", ["outputs", "features", "hidden state"])
def test_what_a_loss_is_computed_from_is_kept(what: str) -> None:
    """Outputs, features and a state that are kept with their history are seen, and told from losses that are."""
    assert str(only_finding(*keeps(what), steps=12)) == (
        "[graph-kept-alive] parts of the autograd graphs of 8 of the first 8 steps were still alive when the run "
        "ended, while the losses were not\n"
        "  cause: something that a loss is computed from is kept with its history from step to step, so that memory "
        "grows with every step: usually outputs or features in a list (`outputs.append(model(x))`), a running average "
        "of them, a hidden state, or gradients of backward(create_graph=True)\n"
        "  fix: keep what .detach() returns of it (set such a .grad to None)"
    )


def test_what_backward_never_ran_on_is_kept() -> None:
    """A validation score that is kept with its history is seen, although no backward pass ever marked its graph."""
    assert str(only_finding(*keeps("scores"), steps=12)) == (
        "[graph-kept-alive] graphs that forward passes made in 4 of the first 4 steps were still alive when the run "
        "ended, while the losses were not\n"
        "  cause: an output of the model, or what is computed from it, is kept with its history from step to step, so "
        "that memory grows with every step: usually a validation loss outside of torch.no_grad(), or features in a "
        "queue or memory bank\n"
        "  fix: compute it under torch.no_grad(), or keep what .detach() returns of it"
    )


@pytest.mark.parametrize("what", ["nothing", "hidden state that is cut", "last scores", "scores without grad"])
def test_what_is_not_kept_is_no_finding(what: str) -> None:
    """The same loop that keeps nothing, or only the last few, gets no finding."""
    make_setup, step = keeps(what)
    assert run_training(make_setup, (X, Y), step, steps=12).check().ok


def test_outputs_that_wait_for_their_backward() -> None:
    """What an episode keeps until it trains is no finding in a run of a few updates, even if it ends in between."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        setup.waiting = []
        return setup

    def step(setup: TrainingSetup, batch: Any) -> dict[str, float]:
        if setup.step_index == 0:
            setup.model(batch[0]).square().mean().backward()
            setup.optimizer.step()
        setup.waiting.append(setup.model(batch[0]))
        return {"waiting": float(len(setup.waiting))}

    assert run_training(make_setup, (X, Y), step, steps=12).check().findings == ()


class Average:
    """An exponential moving average of a model's weights, and its mistakes."""

    def __init__(self, model: nn.Module, *, clone: bool = True, decay: float = 0.99) -> None:
        self.decay = decay
        self.shadow = [p.detach().clone() if clone else p.detach() for p in model.parameters()]

    @torch.no_grad()
    def update(self, tensors: list[Tensor]) -> None:
        for mine, other in zip(self.shadow, tensors, strict=True):
            mine.mul_(self.decay).add_(other, alpha=1.0 - self.decay)

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {"shadow": self.shadow}


def averaged(update: Callable[[TrainingSetup], object], **options: Any) -> tuple[Callable[[], TrainingSetup], Step]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return TrainingSetup(model, optimizer, state={"ema": Average(model, **options)})

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        update(setup)
        return loss.detach()

    return make_setup, step


def with_itself(setup: TrainingSetup) -> None:
    setup.state["ema"].update(setup.state["ema"].shadow)


def with_copies(setup: TrainingSetup) -> None:
    setup.state["ema"].update([p.clone() for p in setup.state["ema"].shadow])


def with_the_model(setup: TrainingSetup) -> None:
    setup.state["ema"].update(list(setup.model.parameters()))


@pytest.mark.parametrize(
    ("update", "options"), [(with_itself, {}), (with_copies, {}), (with_the_model, {"decay": 1.0})]
)
def test_average_that_is_written_to_and_stays(update: Callable[[TrainingSetup], object], options: Any) -> None:
    """An average of itself, or one with a decay of 1, is seen although it is written to in every step."""
    finding = only_finding(*averaged(update, **options))
    assert finding.rule == "ema-never-updated"
    assert finding.seen == (
        "setup.state['ema'] (Average) started as a copy of the weights and did not follow them in 8 updates, "
        f"although it was written to: the weights moved by {finding.evidence['relative_change']:.3g} of their size, "
        "the average by less than 1e-05 of that in their direction"
    )
    assert finding.cause == (
        "undecided: its update is given the average itself (or the initial weights) instead of the trained model, "
        "its decay is 1, or its updates round away in float32"
    )


class ByName(Average):
    """Keeps its copies under the names that a wrapped model gives them, and counts its updates."""

    def __init__(self, model: nn.Module, prefix: str) -> None:
        super().__init__(model)
        self.calls = 0
        self.named = {
            prefix + name: tensor for (name, _), tensor in zip(model.named_parameters(), self.shadow, strict=True)
        }

    @torch.no_grad()
    def update_from(self, model: nn.Module) -> None:
        self.calls += 1
        for name, p in model.named_parameters():
            if name in self.named:
                self.named[name].lerp_(p, 0.1)


@pytest.mark.parametrize(("prefix", "noted"), [("module.", True), ("", False)])
def test_average_that_only_counts(prefix: str, noted: bool) -> None:
    """An average whose update counts and finds none of its names is noted: it may also begin later."""
    make_setup, step = averaged(lambda setup: setup.state["named"].update_from(setup.model))

    def with_names() -> TrainingSetup:
        setup = make_setup()
        setup.state = {"named": ByName(setup.model, prefix)}
        return setup

    report = run_training(with_names, (X, Y), step, steps=8).check()
    assert report.findings == ()
    assert len(report.notes) == noted
    for note in report.notes:
        assert str(note) == (
            "[static-state] setup.state['named'] (ByName) started as a copy of the weights and only counts: in 8 "
            "updates a number of it went from 0 to 8 and nothing wrote to its copy, while the weights moved by "
            f"{note.evidence['relative_change']:.3g} of their size\n"
            "  cause: undecided: it begins later (a warmup, every n-th update), does not write in place "
            "(`e = e.lerp(...)` for `e.lerp_(...)`), or finds none of its names (a prefix)\n"
            "  fix: nothing, if it begins later; else look at what its update writes to"
        )
        assert 0.01 < note.evidence["relative_change"] < 1.0


def test_average_that_is_the_model() -> None:
    """An average that holds the parameters themselves is the model."""
    assert str(only_finding(*averaged(with_the_model, clone=False))) == (
        "[ema-never-updated] setup.state['ema'] (Average) shares the memory of all of the model's weights: "
        "it is the model, and no average of it\n"
        "  cause: it holds the parameters themselves (`p.data`, `p.detach()`) instead of copies: every update of the "
        "weights is at once its own\n"
        "  fix: copy the weights when the average is made: p.detach().clone(), or copy.deepcopy(model)"
    )


def test_average_that_is_asked_and_never_updated() -> None:
    """An average that is evaluated but never updated is seen, and that it was used is said."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05), state={"ema": ema})

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        with torch.no_grad():
            setup.state["ema"](batch[0])
        return loss.detach()

    assert only_finding(make_setup, step).seen == (
        "setup.state['ema'] (AveragedModel) started as a copy of the weights and never changed in 8 updates, "
        "although forward passes used it"
    )
