"""What the training state of a setup holds, and that all of it comes back."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tl_core import TrainingSetup, preserve_rng
from tl_resume import load_training_state, save_training_state, training_state


@pytest.fixture(autouse=True)
def _own_rng():
    with preserve_rng():
        yield


def _setup(**options: Any) -> TrainingSetup:
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)


def test_a_state_has_all_sections_and_names():
    """Parameters, modes and gradients are under the author's names; nothing is copied."""
    setup = _setup()
    setup.model(torch.ones(1, 2)).sum().backward()
    setup.model[1].eval()
    setup.step_index = 4
    state = training_state(setup)
    assert list(state) == [
        "model",
        "optimizers",
        "schedulers",
        "scaler",
        "state",
        "attributes",
        "iterators",
        "parameters",
        "generators",
        "rng",
        "modes",
        "gradients",
        "classes",
        "step_index",
    ]
    assert state["model"]["0.weight"].data_ptr() == setup.model[0].weight.data_ptr()
    assert state["modes"] == {"": True, "0": True, "1": False}
    assert list(state["gradients"]) == ["0.weight", "0.bias"]
    assert state["optimizers"]["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    assert state["classes"] == {"optimizers['optimizer']": "SGD"}
    assert (state["step_index"], state["scaler"], sorted(state["rng"])) == (4, None, ["numpy", "python", "torch"])


def test_pending_gradients_and_modes_come_back(tmp_path):
    """A cycle of accumulation goes on in its middle; gradients that the file has not are None again."""
    setup = _setup()
    setup.model(torch.ones(1, 2)).sum().backward()
    setup.model[0].bias.grad = None
    setup.model[1].eval()
    save_training_state(setup, tmp_path / "state")
    resumed = _setup()
    resumed.model(torch.ones(1, 2)).mean().backward()
    load_training_state(resumed, tmp_path / "state")
    assert torch.equal(resumed.model[0].weight.grad, setup.model[0].weight.grad)
    assert resumed.model[0].bias.grad is None
    assert [module.training for module in resumed.model.modules()] == [True, True, False]


def test_a_sparse_gradient_comes_back_sparse(tmp_path):
    """The gradient of an embedding with sparse=True is no dense tensor."""

    def build() -> TrainingSetup:
        model = nn.Embedding(5, 2, sparse=True)
        return TrainingSetup(model, torch.optim.SparseAdam(list(model.parameters()), lr=0.1))

    setup = build()
    setup.model(torch.tensor([1, 1, 3])).sum().backward()
    save_training_state(setup, tmp_path / "state")
    resumed = build()
    load_training_state(resumed, tmp_path / "state")
    assert resumed.model.weight.grad.is_sparse
    assert torch.equal(resumed.model.weight.grad.to_dense(), setup.model.weight.grad.to_dense())


def test_all_global_generators_come_back(tmp_path):
    """python, numpy and torch go on where they were when the state was saved."""
    setup = _setup()
    save_training_state(setup, tmp_path / "state")
    expected = (random.random(), np.random.rand(), torch.rand(1))
    load_training_state(_setup(), tmp_path / "state")
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


class Augment:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.shuffle = random.Random(seed)


class Noise(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.zeros(1))


def test_generators_that_a_setup_holds_come_back(tmp_path):
    """Generators in modules, in setup.state, in objects and in loaders are found and named."""

    def build(seed: int) -> TrainingSetup:
        model = nn.Sequential(Noise(seed))
        state = {"masks": torch.Generator().manual_seed(seed)}
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), state=state)
        setup.augment = Augment(seed)
        setup.legacy = np.random.RandomState(seed)
        data = torch.utils.data.TensorDataset(torch.arange(4))
        generator = torch.Generator().manual_seed(seed)
        setup.loader = torch.utils.data.DataLoader(data, shuffle=True, generator=generator)
        return setup

    def draw(setup: TrainingSetup) -> list[Any]:
        return [
            setup.model[0].generator.get_state().tolist(),
            setup.state["masks"].get_state().tolist(),
            setup.augment._rng.random(),
            setup.augment.shuffle.random(),
            setup.legacy.rand(),
            setup.loader.generator.get_state().tolist(),
        ]

    setup = build(1)
    draw(setup)
    assert list(training_state(setup)["generators"]) == [
        "model.0.generator",
        "state['masks']",
        "setup.augment._rng",
        "setup.augment.shuffle",
        "setup.legacy",
        "setup.loader.sampler.generator",
    ]
    save_training_state(setup, tmp_path / "state")
    expected = draw(setup)
    resumed = build(2)
    load_training_state(resumed, tmp_path / "state")
    assert draw(resumed) == expected


class Ema:
    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(2), 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = state["mean"], state["count"]


def test_state_and_attributes_come_back_in_place(tmp_path):
    """Objects load their state, and plain data fill the dicts, lists and tensors that are there."""

    def build() -> TrainingSetup:
        history: list[float] = []
        setup = _setup(state={"ema": Ema(), "history": history, "criterion": nn.Linear(2, 2), "best": None})
        setup.counts = Counter()
        setup.running = torch.zeros(3)
        setup.mine = history
        setup.log = print
        setup.average = Ema()
        setup.raw = setup.model
        return setup

    setup = build()
    setup.state["ema"].count, setup.average.mean = 3, torch.ones(2)
    setup.state["history"].extend([1.5, 2.5])
    setup.state["best"] = 0.25
    setup.counts.update("aab")
    setup.running += 2
    setup.late = {"epoch": (1, 2)}  # an attribute that only training sets
    assert sorted(training_state(setup)["attributes"]) == ["average", "counts", "late", "mine", "running"]
    save_training_state(setup, tmp_path / "state")
    resumed = build()
    history, running, counts = resumed.state["history"], resumed.running, resumed.counts
    load_training_state(resumed, tmp_path / "state")
    assert (resumed.state["ema"].count, resumed.average.mean.tolist()) == (3, [1.0, 1.0])
    assert (history, resumed.mine, resumed.state["best"]) == ([1.5, 2.5], [1.5, 2.5], 0.25)
    assert resumed.state["history"] is history
    assert resumed.counts is counts
    assert counts == {"a": 2, "b": 1}
    assert resumed.running is running
    assert running.tolist() == [2.0, 2.0, 2.0]
    assert resumed.late == {"epoch": (1, 2)}
    assert torch.equal(resumed.state["criterion"].weight, setup.state["criterion"].weight)


def test_tensors_that_only_an_optimizer_holds_are_state(tmp_path):
    """Latents that are trained beside the model are saved by their position, those of an attribute by its name."""

    def build(value: float) -> TrainingSetup:
        model = nn.Linear(1, 1)
        latent, named = (torch.full((2,), value, requires_grad=True) for _ in range(2))
        criterion = nn.Linear(1, 1, bias=False)
        parameters = [*model.parameters(), latent, named, *criterion.parameters()]
        setup = TrainingSetup(model, torch.optim.Adam(parameters), state={"criterion": criterion})
        setup.codes = named
        return setup

    setup = build(1.0)
    names = training_state(setup)["optimizers"]["optimizer"]["param_groups"][0]["params"]
    assert names == ["weight", "bias", "optimizer#2", "setup.codes", "state.criterion.weight"]
    save_training_state(setup, tmp_path / "state")
    resumed = build(2.0)
    latent = resumed.optimizer.param_groups[0]["params"][2]
    load_training_state(resumed, tmp_path / "state")
    assert latent.tolist() == resumed.codes.tolist() == [1.0, 1.0]
    assert latent.requires_grad
    assert resumed.codes is resumed.optimizer.param_groups[0]["params"][3]


class Hooked(nn.Module):
    """Has extra state, and derives something from its weight when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.mode = "cold"
        self.derived: Any = None
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "derived", module.weight.tolist()))

    def get_extra_state(self) -> Any:
        return {"mode": self.mode}

    def set_extra_state(self, state: Any) -> None:
        self.mode = state["mode"]


def test_extra_state_and_load_hooks_of_modules_are_used(tmp_path):
    """Copying into parameters does not pass by what a module does when it is loaded."""

    def build() -> TrainingSetup:
        model = nn.Sequential(Hooked())
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    setup = build()
    with torch.no_grad():
        setup.model[0].weight.fill_(3)
    setup.model[0].mode = "warm"
    save_training_state(setup, tmp_path / "state")
    resumed = build()
    load_training_state(resumed, tmp_path / "state")
    assert (resumed.model[0].mode, resumed.model[0].derived) == ("warm", [3.0, 3.0])


def test_a_lazy_module_is_made_by_loading(tmp_path):
    """A module that has not run yet gets the shapes of the file."""

    def build() -> TrainingSetup:
        model = nn.Sequential(nn.LazyLinear(3))
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))

    setup = build()
    setup.model(torch.ones(1, 4)).sum().backward()
    setup.optimizer.step()
    save_training_state(setup, tmp_path / "state")
    resumed = build()
    load_training_state(resumed, tmp_path / "state")
    assert torch.equal(resumed.model[0].weight, setup.model[0].weight)
    assert torch.equal(resumed.model[0].weight.grad, setup.model[0].weight.grad)
    buffer = resumed.optimizer.state[resumed.model[0].weight]["momentum_buffer"]
    assert torch.equal(buffer, setup.optimizer.state[setup.model[0].weight]["momentum_buffer"])


def test_tied_weights_and_odd_layouts_come_back(tmp_path):
    """Tied parameters stay tied, and a channels_last weight keeps its layout."""

    def build() -> TrainingSetup:
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Conv2d(2, 3, 3)})
        model["b"].weight = model["a"].weight
        model["c"].to(memory_format=torch.channels_last)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    setup = build()
    save_training_state(setup, tmp_path / "state")
    resumed = build()
    load_training_state(resumed, tmp_path / "state")
    assert resumed.model["b"].weight is resumed.model["a"].weight
    for name, parameter in setup.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter)
    assert resumed.model["c"].weight.is_contiguous(memory_format=torch.channels_last)


def test_the_scaler_comes_back(tmp_path):
    """Scale and growth of an enabled scaler are state; a disabled one has none."""

    def build(enabled: bool) -> TrainingSetup:
        return _setup(scaler=torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled))

    setup = build(True)
    setup.scaler.scale(torch.ones(1))
    setup.scaler.update(2.0)
    save_training_state(setup, tmp_path / "state")
    resumed = build(True)
    resumed.scaler.scale(torch.ones(1))
    load_training_state(resumed, tmp_path / "state")
    assert resumed.scaler.get_scale() == 2.0
    save_training_state(build(False), tmp_path / "disabled")
    load_training_state(build(False), tmp_path / "disabled")
    with pytest.raises(ValueError) as caught:
        load_training_state(build(True), tmp_path / "disabled")
    assert str(caught.value) == (
        f"{tmp_path}/disabled does not fit the setup, which is as it was:\n  scaler: it is enabled, the file's was not"
    )


def test_what_has_no_state_dict_is_named():
    """An entry of setup.state that cannot be saved is an error, an attribute of the setup is left out."""
    setup = _setup(state={"tool": Augment(1)})
    with pytest.raises(TypeError) as caught:
        training_state(setup)
    assert str(caught.value) == (
        "state['tool'] is a Augment without state_dict() and load_state_dict(): "
        "add both, or keep it as an attribute of the setup if it is not training state"
    )
    setup = _setup(schedulers=type("Warm", (), {"step": lambda self: None})())
    with pytest.raises(TypeError) as caught:
        training_state(setup)
    assert str(caught.value) == (
        "the scheduler 'scheduler' is a Warm without state_dict() and load_state_dict(): add both"
    )
    with pytest.raises(TypeError) as caught:
        training_state(nn.Linear(1, 1))
    assert str(caught.value) == "setup must be a TrainingSetup, got a Linear"


def test_what_a_state_dict_may_not_hold_is_named(tmp_path):
    """A file names the path of what it cannot hold, and nothing has been written."""
    setup = _setup(schedulers=_FunctionScheduler())
    with pytest.raises(TypeError) as caught:
        save_training_state(setup, tmp_path / "state")
    assert str(caught.value) == (
        "state['schedulers']['scheduler']['f'] is a builtin_function_or_method, which cannot be saved without pickle: "
        "keep plain data, or give the object a state_dict()"
    )
    assert list(tmp_path.iterdir()) == []


class _FunctionScheduler:
    def step(self) -> None:
        pass

    def state_dict(self) -> Any:
        return {"f": print}

    def load_state_dict(self, state: Any) -> None:
        pass
