"""A frozen encoder whose BatchNorm goes on moving its statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[frozen-buffer-moved] 0.1.running_mean, 0.1.running_var, 0.1.num_batches_tracked changed during the run, although the \
BatchNorm1d modules that hold them are frozen (no parameter there is trainable)
  cause: they ran in training mode: requires_grad_(False) does not stop what a forward pass writes, such as running \
statistics
  fix: put the frozen part in eval mode (module.eval()), again after each model.train()"""


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def _encoder(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU())


def _case(in_eval: bool, norm: Any = lambda: nn.BatchNorm1d(8), step: Any = _train) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(_encoder(norm()), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        if in_eval:
            model[0].eval()
        return TrainingSetup(model, torch.optim.SGD(model[1].parameters(), lr=0.05))

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def buggy() -> dict[str, Any]:
    return _case(in_eval=False)


def healthy() -> dict[str, Any]:
    return _case(in_eval=True)


class _RunningNorm(nn.Module):
    """Normalises inputs by statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("square", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.square = self.square.lerp(x.square().mean(0), 0.1)
        return (x - self.mean) / (self.square - self.mean.square()).clamp(min=1e-3).sqrt()


class _WithTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(_encoder(nn.BatchNorm1d(8)), nn.Linear(8, 1))
        self.teacher = nn.Sequential(_encoder(nn.BatchNorm1d(8)), nn.Linear(8, 1)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a teacher that follows by hand": _teacher(),
        "a normaliser of inputs without parameters": _normaliser(lambda: nn.BatchNorm1d(6, affine=False)),
        "a normaliser of one's own": _normaliser(_RunningNorm),
        "no statistics to move": _case(False, lambda: nn.BatchNorm1d(8, track_running_stats=False)),
        "a norm without buffers": _case(False, lambda: nn.LayerNorm(8)),
        "only the norm's weights are frozen, in eval mode": _case(True, lambda: nn.BatchNorm1d(8, affine=False)),
        "scale and shift alone are fixed, in a network that trains": _fixed_affine(),
        "a normaliser of one's own before a frozen target": _random_target(),
        "a teacher in eval mode, in the state": _teacher_in_state(),
        "train() and eval() in every step": _case(True, step=_modes),
        "frozen in turns": _turns(),
    }


def _modes(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.model.train()
    setup.model[0].eval()
    return _train(setup, batch)


def _teacher() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _WithTeacher()
        return TrainingSetup(model, torch.optim.SGD(model.student.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        with torch.no_grad():
            target = setup.model.teacher(batch[0])
        made = setup.model(batch[0])
        loss = (made - batch[1]).square().mean() + (made - target).square().mean()
        loss.backward()
        setup.optimizer.step()
        with torch.no_grad():
            pairs = zip(setup.model.teacher.parameters(), setup.model.student.parameters(), strict=True)
            for teacher, student in pairs:
                teacher.lerp_(student, 0.1)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _normaliser(norm: Any) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(norm(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 6}


def _turns() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(_encoder(nn.BatchNorm1d(8)), nn.Linear(8, 1))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.model[0].requires_grad_(setup.step_index % 2 == 0)
        return _train(setup, batch)

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}


def _fixed_affine() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        model[1].requires_grad_(False)
        return TrainingSetup(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 6}


class _Curious(nn.Module):
    """Learns to predict a frozen random network (random network distillation)."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Sequential(_RunningNorm(), nn.Linear(6, 8)).requires_grad_(False)
        self.predictor = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.predictor(x) - self.target(x)).square().mean(1, keepdim=True)


def _random_target() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _Curious()
        return TrainingSetup(model, torch.optim.SGD(model.predictor.parameters(), lr=0.05))

    return {"make_setup": make_setup, "data": (X, 0 * Y), "step": _train, "steps": 6}


def _teacher_in_state() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 8)
        teacher = _encoder(nn.BatchNorm1d(8)).requires_grad_(False).eval()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05), state={"teacher": teacher})

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - setup.state["teacher"](batch[0])).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 6}
