"""A loop that draws from an iterator of its own, which starts again after a resume."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(10, 4, 4, generator=torch.Generator().manual_seed(1))
BATCHES = [(x, x.sum(dim=1, keepdim=True)) for x in X]

MESSAGE = """\
[data-position-not-restored] the position of setup.batches was not restored (a cycle at item 4 of 10 when saved, a \
cycle at item 0 of 10 after loading): step 4 trained on the inputs that step 0 had without interruption: the data \
start again; the runs part at step 4: loss 2.65762 resumed, 1.16808 without interruption; with it put back after \
loading, the resumed run is the uninterrupted one
  cause: the data start at another place after resuming than where the run had stopped
  fix: save how many batches were drawn (or the sampler's or the loader's own state: torchdata's StatefulDataLoader \
has one) and go on from there in load()"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    setup.batches = itertools.cycle(BATCHES)
    return setup


def step(setup: TrainingSetup, _: Any) -> torch.Tensor:
    return _train(setup, next(setup.batches))


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({"model": setup.model.state_dict(), "step": setup.step_index}, path)


def _case(go_on: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if go_on:
            setup.batches = itertools.islice(setup.batches, state["step"], None)

    return {"make_setup": make_setup, "data": torch.zeros(1), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(go_on=False)


def healthy() -> dict[str, Any]:
    return _case(go_on=True)


def near_misses() -> dict[str, dict[str, Any]]:
    def by_index(setup: TrainingSetup, _: Any) -> torch.Tensor:
        return _train(setup, BATCHES[setup.step_index])

    def handed_in(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        return _train(setup, batch)

    def drawn_for_a_plot(setup: TrainingSetup, _: Any) -> torch.Tensor:
        setup.shown = next(setup.batches)[0].shape
        return by_index(setup, _)

    return {
        "batches chosen by the step's index": {**_case(go_on=False), "step": by_index},
        "batches that are handed in": {**_case(go_on=False), "step": handed_in, "data": BATCHES},
        "an iterator whose batches are not trained on": {**_case(go_on=False), "step": drawn_for_a_plot},
    }
