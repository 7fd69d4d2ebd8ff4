"""Objects that save and load in ways of their own, and what cannot be put back."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume import load_training_state, save_training_state, training_state


class Lookahead:
    """An optimizer around another one, whose state has a layout of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.slow = inner, [parameter.detach().clone() for parameter in inner.param_groups[0]["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.slow = state["slow"]


class OwnModule(nn.Module):
    """A module that saves one number, as a string."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"value": str(self.weight.item())}

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            self.weight.fill_(float(state["value"]))


def test_layouts_of_ones_own_are_kept_as_they_are(tmp_path):
    """An optimizer and a module with their own state_dict load what they have saved."""

    def build(value: float) -> TrainingSetup:
        model = OwnModule(value)
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        return TrainingSetup(model, optimizer, state={"other": OwnModule(value)})

    setup = build(3.0)
    assert training_state(setup)["model"] == {"value": "3.0"}
    assert sorted(training_state(setup)["optimizers"]["optimizer"]) == ["inner", "slow"]
    save_training_state(setup, tmp_path / "state")
    resumed = build(1.0)
    load_training_state(resumed, tmp_path / "state")
    assert (resumed.model.weight.item(), resumed.state["other"].weight.item()) == (3.0, 3.0)
    assert float(resumed.optimizer.slow[0]) == 3.0


def test_a_data_parallel_model_loads_the_file_of_a_plain_one(tmp_path):
    """The module. that wrappers put before names stands in no file."""
    model = nn.Linear(2, 1)
    save_training_state(TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), tmp_path / "state")
    other = nn.Linear(2, 1)
    wrapped = TrainingSetup(nn.DataParallel(other), torch.optim.SGD(other.parameters(), lr=0.1))
    load_training_state(wrapped, tmp_path / "state")
    assert torch.equal(other.weight, model.weight)


class Stubborn:
    """Loads its first state, and nothing after that."""

    def __init__(self, loads: int) -> None:
        self.loads = loads

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads -= 1
        if self.loads < 0:
            raise RuntimeError("no more")


def test_what_cannot_be_put_back_is_named(tmp_path):
    """An object that loads, and refuses its own old state, is said to be changed."""

    def build(first: int, second: int) -> TrainingSetup:
        model = nn.Linear(1, 1)
        state = {"first": Stubborn(first), "second": Stubborn(second)}
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), state=state)

    save_training_state(build(1, 1), tmp_path / "state")
    with pytest.raises(ValueError) as caught:
        load_training_state(build(1, 0), tmp_path / "state")
    assert str(caught.value) == (
        f"{tmp_path}/state: state['second'] could not be restored (RuntimeError: no more); "
        "these could not be put back: state['second'], state['first']"
    )


def test_plain_data_are_put_back_when_a_later_object_refuses(tmp_path):
    """Lists, dicts, deques, sets and tensors have their old contents, in the same objects."""

    def build(loads: int, value: int) -> TrainingSetup:
        model = nn.Linear(1, 1)
        plain = [1.0, {"a": [value]}, deque([value], 3), {value}, torch.full((2,), float(value))]
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), state={"plain": plain})
        setup.late = Stubborn(loads)
        return setup

    save_training_state(build(1, 7), tmp_path / "state")
    setup = build(0, 3)
    plain = setup.state["plain"]
    inner = plain[1]["a"]
    with pytest.raises(ValueError):
        load_training_state(setup, tmp_path / "state")
    assert setup.state["plain"] is plain
    assert (plain[1]["a"] is inner, inner, list(plain[2]), plain[3], plain[4].tolist()) == (
        True,
        [3],
        [3],
        {3},
        [3.0, 3.0],
    )
    setup.late.loads = 9
    load_training_state(setup, tmp_path / "state")
    assert (plain[1]["a"] is inner, inner, list(plain[2]), plain[3], plain[4].tolist()) == (
        True,
        [7],
        [7],
        {7},
        [7.0, 7.0],
    )


class Prefixed(nn.BatchNorm1d):
    """A module with a layout of its own, made of torch's tensors and their versions."""

    versions: Any = None

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return super().state_dict(*args, **options)

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        Prefixed.versions = getattr(state, "_metadata", None)
        return super().load_state_dict(state, *args, **options)


def test_modules_with_their_own_layout_are_put_back(tmp_path):
    """When something later refuses its state, such a module has its old values again, loaded with torch's versions."""

    def build(value: float) -> TrainingSetup:
        model = Prefixed(2)
        nn.init.constant_(model.weight, value)
        return TrainingSetup(
            model, torch.optim.SGD(model.parameters(), lr=0.1), state={"late": Stubborn(int(value > 1))}
        )

    save_training_state(build(2.0), tmp_path / "state")
    setup = build(1.0)
    kept = setup.model.weight
    with pytest.raises(ValueError, match="state\\['late'\\] could not be restored"):
        load_training_state(setup, tmp_path / "state")
    assert (setup.model.weight is kept, kept.tolist()) == (True, [1.0, 1.0])
    assert Prefixed.versions == {"": {"version": 2}}


class Shadow:
    """Keeps the tensors that it is given, as they are."""

    def __init__(self, device: str) -> None:
        self.tensors = {"a": torch.ones(2, device=device), "b": [torch.ones(3, device=device), torch.ones(1)]}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


class Remembering(nn.Linear):
    def __init__(self, device: str) -> None:
        super().__init__(1, 1)
        self.last = torch.ones(2, device=device)

    def get_extra_state(self) -> dict[str, Any]:
        return {"last": self.last}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.last = state["last"]


def test_tensors_of_objects_come_to_the_device_where_they_were(tmp_path):
    """Each tensor is where the fresh object has it, one that it does not have yet is on the CPU."""

    def build(device: str) -> TrainingSetup:
        model = Remembering(device)
        state = {"shadow": Shadow(device)}
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), state=state)

    saved = build("cpu")
    saved.state["shadow"].tensors["late"] = torch.ones(1)
    save_training_state(saved, tmp_path / "state")
    setup = build("meta")  # stands for a GPU
    load_training_state(setup, tmp_path / "state")
    tensors = setup.state["shadow"].tensors
    found = [tensors["a"], *tensors["b"], tensors["late"], setup.model.last]
    assert [tensor.device.type for tensor in found] == ["meta", "meta", "cpu", "cpu", "meta"]


def test_parameters_in_one_buffer_are_read_each_by_itself(tmp_path):
    """A model whose parameters are views of one buffer is stored once, and restored into its views."""

    def build() -> TrainingSetup:
        flat = torch.randn(14)
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(4, 2, bias=False))
        model[0].weight = nn.Parameter(flat[0:6].view(2, 3))
        model[1].weight = nn.Parameter(flat[6:14].view(4, 2).t())
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        setup.flat = flat
        return setup

    setup = build()
    save_training_state(setup, tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 18_000
    resumed = build()
    load_training_state(resumed, tmp_path / "state")
    assert torch.equal(resumed.flat, setup.flat)
    for saved, live in zip(setup.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(saved, live)
        assert live.untyped_storage().data_ptr() == resumed.flat.untyped_storage().data_ptr()
