from __future__ import annotations

import argparse
import copy
import json
import random
from textwrap import dedent

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tl_resume import StateFileError, diff_states


def text(block):
    return dedent(block).strip("\n")


def checkpoint():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.encoder = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    model.head = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})


def trainer_folder(folder, *, step=1, shift=0.0):
    """Write what a Hugging Face Trainer writes."""
    state = checkpoint()
    state["model"]["head.weight"] = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    state["model"]["head.weight"][0, 3] += shift
    folder.mkdir()
    save_file(state["model"], folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(state["optimizer"], folder / "optimizer.pt")
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    random.seed(step)
    torch.save(
        {"python": random.getstate(), "numpy": np.random.RandomState(step).get_state()}, folder / "rng_state.pth"
    )
    torch.save(argparse.Namespace(seed=0), folder / "training_args.bin")
    history = [{"step": i, "loss": 1.0 / (i + 1)} for i in range(step)]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))
    (folder / "vocab.txt").write_text("a\nb\n")
    return folder


def test_trainer_folders(tmp_path):
    """Each file's content under its name; what is not read is listed, and compared by its bytes."""
    a, b = trainer_folder(tmp_path / "a"), trainer_folder(tmp_path / "b", step=2, shift=0.25)
    assert str(diff_states(a, b)) == text(f"""
        different: 1 of 28 tensors, 2 plain values, 1 file, 2 only in b
          a: {a}
          b: {b}

        rng_state.pth
          the bytes of the file differ, its content is not read

        model.safetensors
          elements  largest  relative  tensor
            1 of 4     0.25    0.0588  head.weight
                                         [0, 3]: 4 -> 4.25

        scheduler.pt
          last_epoch: 1 -> 2

        trainer_state.json
          global_step: 1 -> 2

        only in b
          trainer_state.json: log_history[1].* (2 entries)

        not read
          rng_state.pth
            needs numpy._core.multiarray._reconstruct to be unpickled, which the safe reader refuses
          training_args.bin
            needs argparse.Namespace to be unpickled, which the safe reader refuses
            both sides hold the same bytes
    """)


def test_a_trainer_folder_against_itself_is_the_same(tmp_path):
    """Files that are refused but equal leave nothing open."""
    diff = diff_states(trainer_folder(tmp_path / "a"), trainer_folder(tmp_path / "b"))
    assert diff.same
    assert str(diff).splitlines()[0].endswith(", 2 files byte for byte")


def test_a_refused_file_of_one_folder_only(tmp_path):
    """A file that one folder lacks is listed as such; one that only one side can read is not compared."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(1)}, tmp_path / name / "model.pt")
    torch.save(argparse.Namespace(), tmp_path / "a" / "args.bin")
    diff = diff_states(tmp_path / "a", tmp_path / "b")
    assert [str(entry) for entry in diff.only_in_a] == ["args.bin (a file that is not read)"]
    torch.save({"x": torch.ones(1)}, tmp_path / "b" / "args.bin")
    diff = diff_states(tmp_path / "a", tmp_path / "b")
    assert (diff.only_in_a, diff.only_in_b, diff.same) == ((), (), False)


def test_sharded_models(tmp_path):
    """Shards are one model, as a folder and by their index file."""
    state = checkpoint()["model"]
    names = list(state)
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    whole.mkdir()
    shards.mkdir()
    save_file(state, whole / "model.safetensors")
    files = {name: f"model-0000{1 + (i > 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, shards / file)
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert diff_states(whole, shards).same
    assert diff_states(index, whole / "model.safetensors").same
    index.write_text(json.dumps({"weight_map": {**files, "w": "../whole/model.safetensors"}}))
    with pytest.raises(StateFileError) as caught:
        diff_states(shards, whole)
    assert str(caught.value) == (
        f"{index}: names the shard '../whole/model.safetensors', which is not a file beside it"
    )
    index.write_text(json.dumps({"weight_map": {**files, "w": files[names[0]]}}))
    with pytest.raises(StateFileError) as caught:
        diff_states(shards, whole)
    assert str(caught.value) == f"{index}: the shards lack 'w' and 0 more of its tensors"


def test_distributed_checkpoints_are_refused_with_a_way_out(tmp_path):
    """A folder of torch.distributed.checkpoint, whose metadata is a pickle."""
    (tmp_path / ".metadata").write_bytes(b"x")
    with pytest.raises(StateFileError) as caught:
        diff_states(tmp_path, {})
    assert str(caught.value) == (
        f"{tmp_path}: a checkpoint of torch.distributed.checkpoint, which is not read here; convert it with "
        "torch.distributed.checkpoint.format_utils.dcp_to_torch_save and compare the file that this writes"
    )
