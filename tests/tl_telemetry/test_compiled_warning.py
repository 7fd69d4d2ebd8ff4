"""torch warns of global module hooks where a module is compiled: not of those that watching adds."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import observe, run_training


def make_setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = torch.compile(nn.Linear(4, 1), backend="aot_eager")
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_watching_a_compiled_module_warns_of_nothing() -> None:
    """A compiled model runs watched where every warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = run_training(make_setup, torch.ones(2, 4), loss_fn=loss_fn, steps=2)
    assert [note.rule for note in run.notes] == []


def test_torch_does_warn_of_global_hooks() -> None:
    """Without the filter the same call would raise, so that the test above can fail."""
    model, _ = make_setup()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.warns(UserWarning, match="when there are global hooks on modules"):
            model(torch.ones(2, 4))
    finally:
        handle.remove()


def test_filters_are_put_back() -> None:
    """Leaving takes the filter out and leaves those of the person alone."""
    with warnings.catch_warnings():
        before = list(warnings.filters)
        with observe(TrainingSetup(*make_setup())):
            assert len(warnings.filters) > len(before)
            warnings.filterwarnings("ignore", message="something of the person's own")
            own = warnings.filters[0]
        assert warnings.filters == [own, *before]
