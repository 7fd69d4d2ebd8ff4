"""A setup that is loaded goes on exactly as the saved one: every kind of optimizer, schedule and other part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from tl_core import TrainingSetup, seed_everything
from tl_resume import load_training_state, save_training_state, training_state
from tl_resume._format import StateFile, write_state

MakeOptimizer = Callable[[nn.Module], Any]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1, bias=False))


def _train(setup: TrainingSetup, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        inputs = torch.randn(8, 4)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            setup.optimizer.zero_grad()
            loss = setup.model(inputs).square().mean()
            loss.backward()
            return loss

        losses.append(setup.optimizer.step(closure).detach())
        for scheduler in setup.schedulers.values():
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(losses[-1])
            else:
                scheduler.step()
        if "average" in setup.state:
            setup.state["average"].update_parameters(setup.model)
        setup.step_index += 1
    return losses


def _bits(state: Any) -> bytes:
    """Write a state as a file would: equal bytes are equal states, bit for bit."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bits"
        write_state(path, state, durable=False)
        return path.read_bytes()


def _assert_goes_on_alike(make: Callable[[], TrainingSetup], path: Any) -> TrainingSetup:
    seed_everything(0)
    setup = make()
    _train(setup, 3)
    save_training_state(setup, path)
    expected = _train(setup, 3)
    seed_everything(1)
    resumed = make()
    assert load_training_state(resumed, path) == 3
    assert torch.equal(torch.stack(_train(resumed, 3)), torch.stack(expected))
    assert _bits(training_state(resumed)) == _bits(training_state(setup))
    return resumed


_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    "adam with tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False),
    "fused adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "two groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1].parameters(), *model[3].parameters()]}]
    ),
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.1),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.5),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters()),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4),
}


@pytest.mark.parametrize("make", _OPTIMIZERS.values(), ids=_OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(make: MakeOptimizer, tmp_path):
    """Losses and state after loading are bit for bit those of the run that never stopped."""

    def build() -> TrainingSetup:
        model = _model()
        return TrainingSetup(model, make(model))

    _assert_goes_on_alike(build, tmp_path / "state")


_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "callable object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, _Decay()),
    "multistep": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "cyclic with a function": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False, scale_fn=lambda x: 0.9**x
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "swa": lambda optimizer: swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=5),
}


class _Decay:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


@pytest.mark.parametrize("make", _SCHEDULERS.values(), ids=_SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(make: Callable[[Any], Any], tmp_path):
    """The learning rates after loading are those of the run that never stopped."""

    def build() -> TrainingSetup:
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return TrainingSetup(model, optimizer, make(optimizer))

    _assert_goes_on_alike(build, tmp_path / "state")


def test_an_averaged_model_goes_on_where_it_was(tmp_path):
    """Averaged weights and their count are part of the state, and are the average's own."""

    def build() -> TrainingSetup:
        model = _model()
        average = swa_utils.AveragedModel(model, use_buffers=True)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), state={"average": average})

    resumed = _assert_goes_on_alike(build, tmp_path / "state")
    assert int(resumed.state["average"].n_averaged) == 6


def test_moments_keep_the_dtype_that_they_had(tmp_path):
    """float32 moments of bfloat16 parameters come back as float32, not rounded by load_state_dict."""

    def build() -> TrainingSetup:
        model = nn.Linear(3, 2).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainingSetup(model, optimizer)

    setup = build()
    for parameter in setup.model.parameters():
        setup.optimizer.state[parameter]["momentum_buffer"] = torch.full(parameter.shape, 1 / 3)
    save_training_state(setup, tmp_path / "state")
    resumed = build()
    load_training_state(resumed, tmp_path / "state")
    assert _bits(training_state(resumed)["optimizers"]) == _bits(training_state(setup)["optimizers"])
    buffer = resumed.optimizer.state[resumed.model.weight]["momentum_buffer"]
    assert (buffer.dtype, float(buffer[0, 0])) == (torch.float32, float(torch.tensor(1 / 3)))


def test_parameters_are_matched_by_name_not_by_position(tmp_path):
    """An optimizer that was given its parameters in another order gets each parameter its own moments."""

    def build(turned: bool) -> TrainingSetup:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        parameters = list(model.parameters())
        return TrainingSetup(model, torch.optim.SGD(parameters[::-1] if turned else parameters, lr=0.1, momentum=0.9))

    setup = build(False)
    setup.model(torch.randn(2, 3)).sum().backward()
    setup.optimizer.step()
    save_training_state(setup, tmp_path / "state")
    resumed = build(True)
    load_training_state(resumed, tmp_path / "state")
    for saved, live in zip(setup.model.parameters(), resumed.model.parameters(), strict=True):
        expected = setup.optimizer.state[saved]["momentum_buffer"]
        assert torch.equal(resumed.optimizer.state[live]["momentum_buffer"], expected)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_and_a_plain_one_load_each_others_files(compiled_first, tmp_path):
    """What torch.compile puts before names stands in no file."""

    def build(compiled: bool) -> TrainingSetup:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        if compiled:
            model[0] = torch.compile(model[0])
        wrapped = torch.compile(model) if compiled else model
        return TrainingSetup(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))

    setup = build(compiled_first)
    setup.model.eval()
    save_training_state(setup, tmp_path / "state")
    with StateFile(tmp_path / "state") as file:
        assert sorted(file.skeleton()["model"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    resumed = build(not compiled_first)
    load_training_state(resumed, tmp_path / "state")
    for saved, live in zip(setup.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(saved, live)
    assert not any(module.training for module in resumed.model.modules())
