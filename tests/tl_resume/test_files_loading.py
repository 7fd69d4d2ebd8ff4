"""Loading checks first, and an error leaves the setup as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup, preserve_rng
from tl_resume import StateFileError, load_training_state, save_training_state, training_state
from tl_resume._format import StateFile, write_state


@pytest.fixture(autouse=True)
def _own_rng():
    with preserve_rng():
        yield


class Ema:
    """An object with a state, whose loading can be made to fail."""

    def __init__(self) -> None:
        self.mean, self.fails = torch.zeros(2), False

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]
        if self.fails:
            torch.rand(1)
            self.fails = False
            raise KeyError("decay")


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.notes = "fresh"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)

    def get_extra_state(self) -> str:
        return self.notes

    def set_extra_state(self, state: str) -> None:
        self.notes = state


def build(**changes: Any) -> TrainingSetup:
    model = changes.get("model", nn.Sequential(Extra(), nn.Linear(2, 1)))
    optimizer = changes.get("optimizer", torch.optim.AdamW)(changes.get("groups", nn.Module.parameters)(model), lr=0.1)
    scheduler = changes.get("scheduler", lr_scheduler.ExponentialLR)(optimizer, 0.9)
    state = {"ema": Ema(), "history": [1.0], "masks": torch.Generator().manual_seed(changes.get("seed", 0))}
    setup = TrainingSetup(model, optimizer, scheduler, state={**state, **changes.get("state", {})})
    setup.counts = {"seen": np.zeros(2), "epochs": [0]}
    return setup


def trained() -> TrainingSetup:
    setup = build(seed=5)
    for _ in range(3):
        setup.model(torch.randn(4, 2)).sum().backward()
        setup.optimizer.step()
        setup.scheduler.step()
        setup.step_index += 1
    setup.model[0].notes = "trained"
    setup.model[0].eval()
    setup.state["ema"].mean.fill_(2)
    setup.state["history"].append(2.0)
    setup.counts["epochs"][0] = 7
    setup.counts["seen"] += 1
    return setup


def bits(setup: TrainingSetup, folder: Any) -> bytes:
    path = folder / "bits"
    write_state(path, training_state(setup), durable=False)
    return path.read_bytes()


def refusal(path: Any, setup: TrainingSetup, tmp_path: Any, kind: type[Exception] = ValueError) -> str:
    before = bits(setup, tmp_path)
    with pytest.raises(kind) as caught:
        load_training_state(setup, path)
    assert type(caught.value) is kind
    assert bits(setup, tmp_path) == before
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_a_loaded_setup_is_the_saved_one(tmp_path):
    """Everything of the state comes back, bit for bit, and the step index is returned."""
    setup = trained()
    save_training_state(setup, tmp_path / "state")
    fresh = build()
    assert bits(fresh, tmp_path) != bits(setup, tmp_path)
    assert load_training_state(fresh, tmp_path / "state") == 3
    save_training_state(fresh, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "state").read_bytes()


_FIT = " does not fit the setup, which is as it was:"


def _small() -> nn.Module:
    return nn.Sequential(Extra(), nn.Linear(2, 3, bias=False))


_MISFITS: dict[str, tuple[Callable[[], TrainingSetup], str]] = {
    "model": (
        lambda: build(model=_small()),
        "\n  model: unexpected 1.bias; shape of 1.weight is (3, 2), the file has (1, 2)"
        "\n  optimizers['optimizer']: group 0: unexpected 1.bias"
        "\n  gradients: unexpected 1.bias; shape of 1.weight is (3, 2), the file has (1, 2)",
    ),
    "dtype": (
        lambda: build(model=nn.Sequential(Extra(), nn.Linear(2, 1).to(torch.float16))),
        "\n  model: dtype of 1.weight is float16, the file has float32; "
        "dtype of 1.bias is float16, the file has float32"
        "\n  gradients: dtype of 1.weight is float16, the file has float32; "
        "dtype of 1.bias is float16, the file has float32",
    ),
    "missing": (
        lambda: build(model=nn.Sequential(Extra(), nn.Linear(2, 1), nn.Linear(1, 1))),
        "\n  model: missing 2.* (2 tensors)"
        "\n  optimizers['optimizer']: group 0: missing 2.* (2 tensors)"
        "\n  modes: missing 2",
    ),
    "optimizer class": (
        lambda: build(optimizer=torch.optim.SGD),
        "\n  optimizers['optimizer']: it is a SGD, the file has a AdamW",
    ),
    "groups": (
        lambda: build(groups=lambda model: [{"params": part.parameters()} for part in model]),
        "\n  optimizers['optimizer']: 2 parameter groups, the file has 1",
    ),
    "scheduler class": (
        lambda: build(scheduler=lr_scheduler.StepLR),
        "\n  schedulers['scheduler']: it is a StepLR, the file has a ExponentialLR",
    ),
    "state": (
        lambda: build(state={"ema": [1], "history": {}, "more": 1}),
        "\n  state: missing more"
        "\n  state['ema']: it is plain data, the file has a state_dict()"
        "\n  state['history']: it is a dict, the file has a list",
    ),
    "generator": (
        lambda: build(state={"masks": 1}),
        "\n  state: missing masks\n  generators: unexpected state['masks']",
    ),
    "scaler": (lambda: _with_scaler(), "\n  scaler: the setup has one, the file has none"),
}


def _with_scaler() -> TrainingSetup:
    setup = build()
    setup.scaler = torch.amp.GradScaler("cpu")
    return setup


@pytest.mark.parametrize(("make", "message"), _MISFITS.values(), ids=_MISFITS)
def test_a_file_that_does_not_fit_is_refused(make, message, tmp_path):
    """All that does not fit is named, a line a section, and nothing has been touched."""
    save_training_state(trained(), tmp_path / "state")
    assert refusal(tmp_path / "state", make(), tmp_path) == _FIT + message


def test_other_optimizers_and_schedulers_are_named(tmp_path):
    """Names of optimizers are compared as those of parameters are."""
    save_training_state(trained(), tmp_path / "state")
    model = nn.Sequential(Extra(), nn.Linear(2, 1))
    optimizers = {part: torch.optim.AdamW(model.parameters()) for part in ("body", "head")}
    setup = TrainingSetup(model, optimizers, state={"ema": Ema(), "history": [], "masks": torch.Generator()})
    setup.counts = {}
    assert refusal(tmp_path / "state", setup, tmp_path) == (
        _FIT + "\n  optimizers: missing body, head; unexpected optimizer\n  schedulers: unexpected scheduler"
    )


@pytest.mark.parametrize("place", ["state", "attribute"])
def test_an_object_that_refuses_its_state_undoes_the_loading(place, tmp_path):
    """What was restored before is put back: optimizers, schedulers, extra state, plain data, generators."""
    setup = trained()
    setup.last = Ema()
    save_training_state(setup, tmp_path / "state")
    other = build()
    other.model(torch.ones(1, 2)).sum().backward()
    other.optimizer.step()
    other.last = Ema()
    failing = other.state["ema"] if place == "state" else other.last
    failing.fails = True
    named = "state['ema']" if place == "state" else "setup.last"
    assert refusal(tmp_path / "state", other, tmp_path) == (
        f": {named} could not be restored (KeyError: 'decay'); the setup is as it was"
    )
    assert failing.fails  # it was set to False by the call that raised
    failing.fails = False
    assert load_training_state(other, tmp_path / "state") == 3
    assert bits(other, tmp_path) == bits(setup, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.1.weight",
        "optimizers.optimizer.state.1.bias.exp_avg_sq",
        "gradients.1.weight",
        "rng.torch",
        "attributes.counts.seen",
    ],
)
def test_a_flipped_byte_leaves_the_setup_as_it_was(name, tmp_path):
    """Digests are checked before what cannot be taken back, and the tensor is named."""
    path = tmp_path / "state"
    save_training_state(trained(), path)
    data = bytearray(path.read_bytes())
    with StateFile(path) as file:
        position = file._begin(file.tensors[name])
    data[position] ^= 1
    path.write_bytes(data)
    assert refusal(path, build(), tmp_path, StateFileError) == (
        f" is damaged: the bytes of {name!r} are not those that were written"
    )


def test_a_file_of_another_state_is_refused(tmp_path):
    """A file that holds something else is no training state."""
    write_state(tmp_path / "state", {"model": {}})
    assert refusal(tmp_path / "state", build(), tmp_path) == (
        _FIT + "\n  it holds no training state: that has the sections model, optimizers, schedulers, scaler, state, "
        "attributes, iterators, parameters, generators, rng, modes, gradients, classes, step_index"
    )


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        (
            "rng",
            {"python": 1},
            "rng of python cannot be set ('int' object is not subscriptable)\n  rng of torch is no tensor",
        ),
        ("rng", {**training_state(build())["rng"], "cuda": 3}, "rng of cuda is no list"),
        ("step_index", -1, "step_index: -1 is no index of a step"),
        ("modes", {"": 3}, "modes: missing 0, 0.layer, 1\n  modes: a mode is no bool"),
        ("modes", {0: True}, "its section modes has a key that is no name"),
        ("model", {1: 2}, "model: the file has no state_dict"),
        ("schedulers", [], "its section schedulers is no dict"),
        ("generators", {"state['masks']": torch.ones(3)}, None),
        ("optimizers", {"optimizer": 3}, "optimizers['optimizer']: the file has no parameter groups by name"),
    ],
    ids=["rng", "cuda", "step_index", "modes", "keys", "model", "section", "generators", "optimizer"],
)
def test_values_of_another_kind_are_refused(section, value, message, tmp_path):
    """A file whose digests are right may still hold anything."""
    state = training_state(trained())
    write_state(tmp_path / "state", {**state, section: value})
    said = refusal(tmp_path / "state", build(), tmp_path)
    if message is None:
        assert said.startswith(_FIT + "\n  the generator state['masks'] cannot be set (")
    else:
        assert said == f"{_FIT}\n  {message}"


def test_a_scheduler_that_gets_nonsense_undoes_the_loading(tmp_path):
    """What torch's own load_state_dict raises is told with the place and the file."""
    state = training_state(trained())
    write_state(tmp_path / "state", {**state, "schedulers": {"scheduler": 3}})
    assert refusal(tmp_path / "state", build(), tmp_path) == (
        ": schedulers['scheduler'] could not be restored (TypeError: 'int' object is not iterable); "
        "the setup is as it was"
    )


def test_a_missing_file_is_named(tmp_path):
    """The error is python's own, and a wrong setup is told from a wrong file."""
    with pytest.raises(FileNotFoundError) as caught:
        load_training_state(build(), tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(TypeError) as wrong:
        load_training_state(nn.Linear(1, 1), tmp_path / "none")
    assert str(wrong.value) == "setup must be a TrainingSetup, got a Linear"


def test_progress_is_shown(tmp_path, capsys):
    """With progress=True both draw a bar that ends at all bytes."""
    pytest.importorskip("rich")
    save_training_state(trained(), tmp_path / "state", progress=True)
    load_training_state(build(), tmp_path / "state", progress=True)
    shown = capsys.readouterr().out
    assert "saving state" in shown
    assert "loading state" in shown
    sizes = [line.split()[3] for line in shown.splitlines()]
    assert all(size.split("/")[0] == size.split("/")[1] for size in sizes)


def test_progress_without_rich_says_what_to_install(monkeypatch, tmp_path):
    """rich is an extra; saving without a bar does not need it."""
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    save_training_state(trained(), tmp_path / "state")
    with pytest.raises(ModuleNotFoundError) as caught:
        save_training_state(trained(), tmp_path / "other", progress=True)
    assert str(caught.value) == 'progress=True needs rich: pip install "tl-resume[cli]"'
