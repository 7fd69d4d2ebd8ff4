"""A checkpoint for inference: the average's weights are saved where the model's should be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[other-weights-loaded] weight, bias differ after loading (weight: 4 of 4 elements, the most at [0, 3]: 0.467303 when \
saved, 0.322582 after loading); the runs part at step 4: loss 2.21646 resumed, 1.48417 without interruption; with it \
put back after loading, the resumed run is the uninterrupted one
  cause: the loaded weights are the ones that setup.state['average'] held when saved
  fix: save the model's own weights, and load them and what else holds weights each into its own place"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05), state={"average": average})


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    setup.state["average"].update_parameters(setup.model)
    return loss


def _case(save_average: bool) -> dict[str, Any]:
    def save(setup: TrainingSetup, path: Any) -> None:
        weights = setup.state["average"].module if save_average else setup.model
        torch.save({"model": weights.state_dict(), "average": setup.state["average"].state_dict()}, path)

    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.state["average"].load_state_dict(state["average"])

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(save_average=True)


def healthy() -> dict[str, Any]:
    return _case(save_average=False)


def near_misses() -> dict[str, dict[str, Any]]:
    return {"an average that is the weights": _same(), "the average saved beside the weights": _beside()}


def _same() -> dict[str, Any]:
    def make_copying() -> TrainingSetup:
        setup = make_setup()
        setup.state["average"] = AveragedModel(setup.model, multi_avg_fn=get_ema_multi_avg_fn(0.0))
        return setup

    return {**_case(save_average=True), "make_setup": make_copying}


def _beside() -> dict[str, Any]:
    """The average has the model's names in the file, and is loaded into its own place."""

    def save(setup: TrainingSetup, path: Any) -> None:
        average = setup.state["average"]
        state = {"model": setup.model.state_dict(), "ema": average.module.state_dict(), "n": average.n_averaged}
        torch.save(state, path)

    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        setup.state["average"].module.load_state_dict(state["ema"])
        setup.state["average"].n_averaged.copy_(state["n"])

    return {**_case(save_average=False), "save": save, "load": load}
