"""A loop that diverges: loss and gradient norm grow by orders of magnitude, together and step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tl_core import TrainingSetup

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)

MESSAGE = """\
[diverging] the loss went from 2.62 to 4e+16 and the gradient norm of 'optimizer' from 3.6 to 5.19e+08, through most \
of the 12 steps (learning rate 2)
  cause: undecided: the learning rate is too high for this loss, or a sign is wrong (a loss that should be maximised, \
an update that adds the gradient)
  fix: lower the learning rate by a factor of 10; if the loss still grows, check the signs"""


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def _case(lr: float) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": 12}


def buggy() -> dict[str, Any]:
    return _case(lr=2.0)


def healthy() -> dict[str, Any]:
    return _case(lr=0.2)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a recurrence that explodes and is clipped": _recurrence(),
        "a loss that is weighted more and more": _weighted(),
        "a log-likelihood that goes below 0": _likelihood(),
        "two players, whose losses rise and fall": _players(),
        "one spike": _spike(),
        "a return that is maximised": _return(),
        "a reconstruction that grows with its target": _growing_target(),
    }


def _recurrence() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.ParameterDict({"w": nn.Parameter(1.6 * torch.eye(6)), "out": nn.Parameter(torch.ones(6, 1))})
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        hidden = batch[0]
        for _ in range(12):
            hidden = hidden @ setup.model["w"]
        loss = (hidden @ setup.model["out"] - batch[1]).square().mean()
        loss.backward()
        clip_grad_norm_(setup.model.parameters(), 1.0)
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 12}


def _weighted() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.001))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        # the weight of a term is raised tenfold over the run, as in annealing
        loss = 10.0 ** (setup.step_index / 11) * (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 12}


def _likelihood() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 2)
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.1))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        mean, log_std = setup.model(batch[0]).chunk(2, dim=1)
        loss = -torch.distributions.Normal(mean, log_std.exp()).log_prob(0.01 * batch[1]).sum()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 40}


def _players() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.ModuleDict(
            {"maker": nn.Linear(6, 6), "judge": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))}
        )
        optimizers = {name: torch.optim.Adam(model[name].parameters(), lr=0.02) for name in model}
        return TrainingSetup(model, optimizers)

    def step(setup: TrainingSetup, batch: Any) -> dict[str, Any]:
        maker, judge = setup.model["maker"], setup.model["judge"]
        setup.optimizers["judge"].zero_grad()
        judged = (judge(maker(batch[0]).detach()) - judge(batch[0])).mean()
        judged.backward()
        clip_grad_norm_(judge.parameters(), 1.0)
        setup.optimizers["judge"].step()
        setup.optimizers["maker"].zero_grad()
        made = -judge(maker(batch[0])).mean()
        made.backward()
        setup.optimizers["maker"].step()
        return {"maker": made, "judge": judged}

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 30}


def _spike() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.001))

    data = [(X, Y)] * 8 + [(1e3 * X, Y)] + [(X, Y)] * 3
    return {"make_setup": make_setup, "data": data, "step": _train, "steps": 12}


def _return() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 3)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        policy = torch.distributions.Categorical(logits=setup.model(batch[0]))
        actions = policy.sample()
        loss = -(policy.log_prob(actions) * 100.0 * (actions == 1)).mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 20}


def _growing_target() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1)
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.05))

    # later batches hold larger values, as frames of a growing signal do
    data = [(X, 1.3**k * Y) for k in range(12)]
    return {"make_setup": make_setup, "data": data, "step": _train, "steps": 12}
