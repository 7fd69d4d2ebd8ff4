"""Whole gradients around each act, and the tensors of a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_core import TrainingSetup
from tl_telemetry import Backward, Clip, GradientAct, GradientLog, OptimizerStep, Piece, capture_state, observe


def make_setup(**options: Any) -> TrainingSetup:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, **options)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def gradients(model: nn.Module) -> dict[int, Tensor]:
    return {i: p.grad.detach().clone() for i, p in enumerate(model.parameters()) if p.grad is not None}


def same(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def logged(setup: TrainingSetup, work: Any) -> tuple[list[GradientAct], list[dict[int, Tensor]]]:
    """Return what was logged while ``work`` ran in one step, and what it looked at itself."""
    log, seen = GradientLog(), []
    with observe(setup, gradients=log) as run, run.step():
        work(lambda: seen.append(gradients(setup.model)))
    return log.acts, seen


def test_every_act_has_the_gradients_before_and_after_it() -> None:
    """Backward passes, clips and steps, in order; of a step only what it used."""
    setup = make_setup()

    def work(look: Any) -> None:
        look()
        for _ in range(2):
            setup.model(torch.ones(4, 3)).square().mean().backward()
            look()
        nn.utils.clip_grad_norm_(setup.model.parameters(), 0.1)
        look()
        setup.optimizer.step()
        setup.optimizer.zero_grad()

    acts, (empty, first, second, clipped) = logged(setup, work)
    assert [type(act.event) for act in acts] == [Backward, Backward, Clip, OptimizerStep]
    assert [act.step for act in acts] == [0, 0, 0, 0]
    pairs = [(empty, first), (first, second), (second, clipped), (clipped, {})]
    for act, (before, after) in zip(acts, pairs, strict=True):
        assert same(act.before, before)
        assert same(act.after, after)
    assert sorted(second) == [0, 1]
    assert not torch.equal(second[0], clipped[0])


def test_the_events_are_those_of_the_record() -> None:
    """So that their figures can be read."""
    setup = make_setup()
    log = GradientLog()
    with observe(setup, gradients=log) as run:
        for _ in range(2):
            with run.step():
                setup.model(torch.ones(1, 3)).sum().backward()
                setup.optimizer.step()
    held = [event for record in run.records for event in record.events]
    assert all(any(act.event is event for event in held) for act in log.acts)
    assert [act.step for act in log.acts] == [0, 0, 1, 1]


def test_a_gradient_that_stays_as_it_is_is_copied_once() -> None:
    """From one act to the next, of each parameter by itself; what is cleared and made anew is another copy."""
    setup = make_setup()

    def work(look: Any) -> None:
        for _ in range(2):
            setup.model(torch.ones(4, 3)).square().mean().backward()
            setup.model.bias.grad.mul_(2.0)
            setup.optimizer.step()
            setup.optimizer.zero_grad()

    (first, step, second, _), _ = logged(setup, work)
    assert step.before[0] is first.after[0]
    assert torch.equal(step.before[1], 2.0 * first.after[1])
    assert second.before == {}
    assert not torch.equal(second.after[0], step.before[0])


def test_copies_stay_as_they_were() -> None:
    """What the loop does to its gradients later does not reach them."""
    setup = make_setup()

    def work(look: Any) -> None:
        setup.model(torch.ones(1, 3)).sum().backward()
        for parameter in setup.model.parameters():
            parameter.grad.zero_()

    acts, _ = logged(setup, work)
    assert float(acts[0].after[0].abs().sum()) > 0


def test_gradients_that_are_none_are_missing() -> None:
    """Frozen and unused parameters have none."""
    setup = make_setup()
    setup.model.bias.requires_grad_(False)
    acts, _ = logged(setup, lambda look: setup.model(torch.ones(1, 3)).sum().backward())
    assert (list(acts[0].before), list(acts[0].after)) == ([], [0])


def test_sparse_gradients_are_made_dense() -> None:
    """An embedding's rows."""
    torch.manual_seed(0)
    model = nn.Embedding(4, 2, sparse=True)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    acts, _ = logged(setup, lambda look: model(torch.tensor([1, 1, 3])).sum().backward())
    assert acts[0].after[0].tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


def test_gradients_are_those_with_the_loss_scale() -> None:
    """What lies in .grad is copied: scaled until unscale_, unscaled at the step."""
    setup = make_setup()
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def work(look: Any) -> None:
        setup.scaler.scale(setup.model(torch.ones(1, 3)).sum()).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()

    acts, _ = logged(setup, work)
    assert [float(act.before.get(1, torch.zeros(1)).max()) for act in acts] == [0.0, 1.0]
    assert float(acts[0].after[1].max()) == 8.0


def test_a_closures_passes_are_logged() -> None:
    """LBFGS calls backward within its step: what a step used is what was there after the first."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    setup = TrainingSetup(model, torch.optim.LBFGS(model.parameters(), max_iter=2))

    def closure() -> Tensor:
        setup.optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    acts, _ = logged(setup, lambda look: setup.optimizer.step(closure))
    kinds = [type(act.event) for act in acts]
    assert kinds[-1] is OptimizerStep
    assert kinds[:-1] == [Backward] * (len(kinds) - 1)
    assert len(kinds) > 1
    assert sorted(acts[-1].before) == [0, 1]


def test_acts_can_be_cleared_while_the_run_goes_on() -> None:
    """Each copy of all gradients is kept only as long as somebody wants it."""
    setup = make_setup()
    log = GradientLog()
    with observe(setup, gradients=log) as run:
        for _ in range(3):
            with run.step():
                setup.model(torch.ones(1, 3)).sum().backward()
            assert len(log.acts) == 1
            log.acts = []


def test_without_a_log_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """observe() alone takes figures only; with a log each act is copied."""
    copies = []
    copy = GradientLog.copy
    monkeypatch.setattr(GradientLog, "copy", lambda self, follows: copies.append(1) or copy(self, follows))
    setup = make_setup()
    with observe(setup) as run, run.step():
        setup.model(torch.ones(1, 3)).sum().backward()
        setup.optimizer.step()
    assert copies == []
    logged(setup, lambda look: setup.model(torch.ones(1, 3)).sum().backward())
    assert copies == [1, 1]


def test_a_logged_run_is_bitwise_the_unwatched_one() -> None:
    """Copies change nothing."""

    def train(setup: TrainingSetup) -> Tensor:
        for _ in range(3):
            loss = setup.model(torch.ones(4, 3)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(setup.model.parameters(), 0.5)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return setup.model.weight

    plain, watched = make_setup(), make_setup()
    with observe(watched, gradients=GradientLog()):
        train(watched)
    assert torch.equal(train(plain), watched.model.weight)


def test_the_tensors_of_a_captures_piece_are_yielded() -> None:
    """Place and content of each, as they were when the capture was made."""
    setup = make_setup()
    capture = capture_state(setup)
    before = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    with torch.no_grad():
        setup.model.weight.zero_()
    held = dict(capture.contents(Piece("weights")))
    assert held.keys() == {("weight",), ("bias",)}
    assert torch.equal(held[("weight",)], before["weight"])
    assert list(capture.contents(Piece("no such piece"))) == []


def test_sparse_tensors_of_a_capture_are_made_dense() -> None:
    """Like everything that is compared element by element."""
    setup = make_setup()
    setup.state["graph"] = {"edges": torch.eye(2).to_sparse(), "name": "line"}
    held = dict(capture_state(setup).contents(Piece("state", "graph")))
    assert {path: tensor.tolist() for path, tensor in held.items()} == {("edges",): [[1.0, 0.0], [0.0, 1.0]]}
