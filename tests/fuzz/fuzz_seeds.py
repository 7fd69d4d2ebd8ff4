"""The whole files that are to be damaged, and the setups that they are loaded into."""

from __future__ import annotations

import json
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler

from tl_core import TrainingSetup, preserve_rng
from tl_resume import save_training_state
from tl_resume._format import write_state

SETUPS = ("adamw", "sgd")


class Ema:
    """An object with a state of its own, which takes what it is given."""

    def __init__(self) -> None:
        self.mean, self.decay = torch.zeros(2), 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.decay = state["mean"], float(state["decay"])


class Noted(nn.Module):
    """A module with an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.notes = nn.Linear(2, 2), "fresh"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)

    def get_extra_state(self) -> str:
        return self.notes

    def set_extra_state(self, state: str) -> None:
        self.notes = state + ""


def build_setup(kind: str, *, steps: int = 1) -> TrainingSetup:
    """Build a setup and train it for a few steps, so that there is something to lose."""
    with preserve_rng():
        torch.manual_seed(steps)
        if kind == "adamw":
            model = nn.Sequential(Noted(), nn.BatchNorm1d(2))
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
            scheduler: Any = lr_scheduler.MultiStepLR(optimizer, [2, 4])
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.ones(1))
        else:
            model = nn.Sequential(nn.Linear(2, 1))
            groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.5}]
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
            scheduler, scaler = lr_scheduler.ReduceLROnPlateau(optimizer), None
        state = {
            "ema": Ema(),
            "history": [float(steps)],
            "masks": torch.Generator().manual_seed(steps),
            "rows": np.random.Generator((np.random.Philox if kind == "sgd" else np.random.PCG64)(steps)),
        }
        setup = TrainingSetup(model, optimizer, scheduler, scaler=scaler, state=state)
        setup.counts = {"seen": np.zeros(2) + steps, "epochs": (steps, None)}
        for _ in range(steps):
            model(torch.randn(3, 2)).sum().backward()
            optimizer.step()
            scheduler.step(*([1.0] if kind == "sgd" else []))
        setup.step_index = steps
    return setup


def states() -> dict[str, Any]:
    """Give small states that hold every kind of leaf between them."""
    weight = torch.arange(6.0).view(2, 3)
    kinds = {
        "weight": weight,
        "array": np.arange(2, dtype="<f4"),
        "long": bytes(range(256)) * 17,
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "fortran": np.asfortranarray(np.ones((2, 2))),
        "text": np.array(["a", "bc"]),
        "scalars": [np.float64(1.5), np.datetime64("2020-01-01"), np.str_("x"), 1 + 2j, 2**80, float("nan"), -0.0],
        "bytes": [b"b", bytearray(b"c")],
        "others": [range(3), slice(1, None), torch.Size([2]), torch.float16, {1, 2}, frozenset("a"), {"$": "\ud800"}],
        "torch": [torch.device("cuda", 1), torch.strided, torch.channels_last, pathlib.PurePosixPath("a")],
        "mappings": [OrderedDict(a=1), Counter(a=2), defaultdict(list, {3: [4]}), {1: (2, None), (3,): {}}],
        "queue": deque([1], 3),
    }
    buffer = torch.arange(12, dtype=torch.int16)
    tensors = {
        "weight": weight,
        "tied": [weight, weight],
        "rows": [weight[0], weight[:, 1:]],
        "turned": torch.arange(4.0).view(2, 2).t(),
        "expanded": torch.ones(1).expand(3, 2),
        "pieces": [buffer[2:6], buffer[4:9:2]],
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3),
        "packed": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    return {"kinds": kinds, "tensors": tensors, "plain": {"a": [1, 2.5, "x", None, True], "weight": torch.zeros(1)}}


def write_seeds(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """Write the whole files.

    Returns:
        By target (``"state"``, ``"load"``, ``"diff"``) and name: the file, or the files of a folder.
    """
    seeds: dict[str, dict[str, list[Path]]] = {"state": {}, "load": {}, "diff": {}}
    for name, state in states().items():
        path = folder / f"{name}.safetensors"
        write_state(path, state, durable=False)
        seeds["state"][name] = [path]
    for kind in SETUPS:
        path = folder / f"{kind}.safetensors"
        save_training_state(build_setup(kind, steps=3), path)
        seeds["load"][kind] = [path]
    seeds["diff"] |= {**seeds["state"], "adamw": seeds["load"]["adamw"]}
    setup = build_setup("adamw", steps=2)
    model, optimizer = setup.model.state_dict(), setup.optimizer.state_dict()
    weights = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    foreign = {**weights, "half": torch.ones(2, dtype=torch.float16), "flags": torch.tensor([True])}
    save_file(foreign, folder / "foreign.safetensors", {"format": "pt"})
    checkpoint = {"model": model, "optimizer": optimizer, "epoch": 3, "sparse": torch.eye(2).to_sparse()}
    torch.save(checkpoint, folder / "zip.pt")
    torch.save(checkpoint, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    seeds["diff"] |= {
        path.stem: [path] for path in (folder / name for name in ("foreign.safetensors", "zip.pt", "legacy.pt"))
    }
    seeds["diff"]["folder"] = _trainer_folder(folder / "folder", weights, optimizer)
    return seeds


def _trainer_folder(folder: Path, weights: dict[str, torch.Tensor], optimizer: Any) -> list[Path]:
    """Write what a Trainer's checkpoint with a sharded model holds."""
    folder.mkdir()
    names = list(weights)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / shard)
    index = {
        "metadata": {"total_size": 96},
        "weight_map": {name: shard for shard, held in shards.items() for name in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "trainer_state.json").write_text(
        json.dumps({"epoch": 1.0, "global_step": 3, "log_history": [{"loss": 1}]})
    )
    (folder / "README.md").write_text("notes")
    torch.save(optimizer, folder / "optimizer.pt")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    return sorted(folder.iterdir())
