from __future__ import annotations

import argparse
import copy
import json
import os
import signal
from textwrap import dedent

import pytest
import torch
from safetensors.torch import save_file

from tl_resume import _cli
from tl_resume._format import write_state

STATE = {
    "model": {"encoder.weight": torch.ones(2, 3), "encoder.bias": torch.zeros(2), "head.weight": torch.ones(1000)},
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}],
    },
    "epoch": 3,
}


def text(block):
    return dedent(block).lstrip("\n")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a state file, one that differs, one of torch.save, a model's weights, and a refused one."""
    monkeypatch.chdir(tmp_path)
    other = copy.deepcopy(STATE)
    other["model"]["head.weight"][7] = 1.5
    other["epoch"] = 4
    write_state("a.safetensors", STATE)
    write_state("b.safetensors", other)
    torch.save(STATE, "a.pt")
    save_file(STATE["model"], "model.safetensors")
    torch.save(argparse.Namespace(x=1), "args.bin")
    return tmp_path


def run(capsys, *arguments):
    status = _cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_diff_of_equal_files(files, capsys):
    """Status 0, and how much was compared."""
    assert run(capsys, "diff", "a.safetensors", "a.pt") == (
        0,
        "same: 4 tensors, 4 plain values\n  a: a.safetensors\n  b: a.pt\n",
        "",
    )


def test_diff_of_different_files(files, capsys):
    """Status 1, and what differs."""
    assert run(capsys, "diff", "a.safetensors", "b.safetensors") == (
        1,
        text("""
            different: 1 of 4 tensors, 1 plain value
              a: a.safetensors
              b: b.safetensors

            values
              epoch: 3 -> 4

            model
                elements  largest  relative  tensor
              1 of 1,000      0.5     0.333  head.weight
                                               [7]: 1 -> 1.5
        """),
        "",
    )


def test_diff_with_a_tolerance(files, capsys):
    """What is within the tolerance is the same, and told."""
    write_state("b.safetensors", {**STATE, "epoch": 3, "model": {k: v * 1.001 for k, v in STATE["model"].items()}})
    assert run(capsys, "diff", "a.safetensors", "b.safetensors", "--rtol", "0.01") == (
        0,
        text("""
            same: 4 tensors, 4 plain values
              a: a.safetensors
              b: b.safetensors
              2 of them differ within rtol 0.01, atol 0
        """),
        "",
    )
    assert run(capsys, "diff", "a.safetensors", "b.safetensors", "--rtol", "1e-6", "--atol", "1e-6")[0] == 1


def test_diff_all(files, capsys):
    """With --all every tensor has its row, also where a module would stand for them."""
    write_state("b.safetensors", {**STATE, "model": {k: v + 1 for k, v in STATE["model"].items()}})
    grouped = run(capsys, "diff", "a.safetensors", "b.safetensors")[1]
    every = run(capsys, "diff", "a.safetensors", "b.safetensors", "--all")[1]
    assert [line.split()[-3:] for line in grouped.splitlines() if " of " in line][1:] == [["all", "3", "tensors"]]
    assert [line.split()[-1] for line in every.splitlines() if " of " in line][1:] == list(STATE["model"])


def test_diff_as_json(files, capsys):
    """The schema of diff --json: strict JSON, non-finite numbers as texts."""
    write_state("n.safetensors", {"w": torch.tensor([1.0, float("inf"), float("nan")])})
    write_state("o.safetensors", {"w": torch.tensor([1.0, 2.0, 3.0]), "x": torch.ones(2)})
    status, out, err = run(capsys, "diff", "n.safetensors", "o.safetensors", "--json", "--atol", "0.5")
    assert (status, err) == (1, "")
    assert json.loads(out) == {
        "a": "n.safetensors",
        "b": "o.safetensors",
        "same": False,
        "num_tensors": 1,
        "num_values": 0,
        "num_within_tolerance": 0,
        "rtol": 0.0,
        "atol": 0.5,
        "differences": [
            {
                "path": "w",
                "section": "",
                "name": "w",
                "kind": "value",
                "a": None,
                "b": None,
                "num_elements": 3,
                "num_different": 2,
                "max_abs": "inf",
                "index": [1],
                "values": ["inf", 2.0],
                "max_rel": None,
                "nan_a": 1,
                "nan_b": 0,
                "damaged": [],
            }
        ],
        "only_in_a": [],
        "only_in_b": [{"path": "x", "section": "", "name": "x", "what": "float32 [2]"}],
        "unreadable": [],
        "notes": [],
    }


def test_diff_of_a_refused_file(files, capsys):
    """What could not be read is trouble where nothing else was seen to differ."""
    status, out, err = run(capsys, "diff", "args.bin", "a.pt")
    assert (status, err) == (2, "")
    assert out.splitlines()[0] == "could not be judged: 1 file could not be read"
    assert run(capsys, "diff", "args.bin", "args.bin")[0] == 0


SHOWN = """
    a.safetensors: a state file, format version 1
      4 tensors of 4.04 kB, 4 plain values, file of {size} kB

    values
      epoch: 3

    model  3 tensors, 4.03 kB
      dtype    shape   size  tensor
      float32  [2, 3]  24 B  encoder.weight
      float32  [2]      8 B  encoder.bias
      float32  [1000]  4 kB  head.weight

    optimizer  1 tensor, 4 B
      dtype    shape  size  tensor
      float32  []      4 B  step of parameter 0
      param_groups[0].lr: 0.1
      param_groups[0].betas: (0.9, 0.999)
      param_groups[0].params: ['parameter 0']
"""


def test_show(files, capsys):
    """Sections, tensors and values of a state file."""
    size = f"{os.path.getsize('a.safetensors') / 1000:.3g}"
    status, out, err = run(capsys, "show", "a.safetensors")
    assert (status, err) == (0, "")
    assert out == text(SHOWN).format(size=size)


def test_show_of_many(files, capsys):
    """Many tensors are shown by module and many values are cut, unless all are asked for."""
    many = {f"layers.{i}.{name}": torch.ones(2) for i in range(10) for name in ("weight", "bias")}
    write_state("m.safetensors", {"model": many, "args": {f"x{i}": i for i in range(20)}})
    out = run(capsys, "show", "m.safetensors")[1]
    assert "  float32  [2]    16 B  layers.9.* (2 tensors)\n" in out
    assert out.endswith("  x11: 11\n  ... and 8 more values\n")
    out = run(capsys, "show", "m.safetensors", "--all")[1]
    assert "  float32  [2]     8 B  layers.9.bias\n" in out
    assert out.endswith("  x19: 19\n")


def test_show_of_tied_tensors(files, capsys):
    """What is stored once and named twice has both sizes, so that the smaller one is that of verify."""
    weight = torch.ones(500)
    write_state("t.safetensors", {"a": weight, "b": weight})
    extents = [run(capsys, command, "t.safetensors")[1].splitlines() for command in ("show", "verify")]
    size = f"{os.path.getsize('t.safetensors') / 1000:.3g} kB"
    assert extents[0][1] == f"  2 tensors of 4 kB (2 kB stored), 0 plain values, file of {size}"
    assert extents[1] == [f"intact: t.safetensors (1 tensor of 2 kB, file of {size})"]


def test_show_as_json(files, capsys):
    """The schema of show --json."""
    status, out, _ = run(capsys, "show", "a.pt", "--json")
    shown = json.loads(out)
    size = os.path.getsize("a.pt")
    values = shown["sections"][2].pop("values")
    assert status == 0
    assert values[1] == {"name": "param_groups[0].betas", "value": [0.9, 0.999]}
    assert shown == {
        "path": "a.pt",
        "form": "a torch.save file",
        "version": None,
        "file_bytes": size,
        "num_tensors": 4,
        "num_values": 4,
        "tensor_bytes": 4036,
        "stored_bytes": None,
        "sections": [
            {"section": "", "tensors": [], "values": [{"name": "epoch", "value": 3}]},
            {
                "section": "model",
                "tensors": [
                    {"name": "encoder.weight", "dtype": "float32", "shape": [2, 3], "bytes": 24},
                    {"name": "encoder.bias", "dtype": "float32", "shape": [2], "bytes": 8},
                    {"name": "head.weight", "dtype": "float32", "shape": [1000], "bytes": 4000},
                ],
                "values": [],
            },
            {
                "section": "optimizer",
                "tensors": [{"name": "step of parameter 0", "dtype": "float32", "shape": [], "bytes": 4}],
            },
        ],
        "unreadable": [],
        "notes": [],
    }


def test_show_of_a_folder(files, capsys):
    """A folder shows each file, and names what is not read."""
    status, out, _ = run(capsys, "show", ".")
    assert status == 0
    assert out.endswith(
        "not read\n  args.bin\n    needs argparse.Namespace to be unpickled, which the safe reader refuses\n"
    )


def test_show_of_a_refused_file(files, capsys):
    """A file of which nothing can be shown is trouble."""
    assert run(capsys, "show", "args.bin") == (
        2,
        "",
        "tl-resume: args.bin: needs argparse.Namespace to be unpickled, which the safe reader refuses\n",
    )


def test_verify(files, capsys):
    """Status 0 for an intact file, 1 for a flipped byte, whose tensor is named."""
    size = f"{os.path.getsize('a.safetensors') / 1000:.3g}"
    assert run(capsys, "verify", "a.safetensors") == (
        0,
        f"intact: a.safetensors (4 tensors of 4.04 kB, file of {size} kB)\n",
        "",
    )
    content = bytearray((files / "a.safetensors").read_bytes())
    content[-2000] ^= 1
    (files / "a.safetensors").write_bytes(content)
    assert run(capsys, "verify", "a.safetensors") == (
        1,
        "damaged: a.safetensors: 1 of 4 tensors do not match their digests\n  model.head.weight\n",
        "",
    )
    status, out, _ = run(capsys, "verify", "a.safetensors", "--json")
    assert (status, json.loads(out)) == (
        1,
        {
            "path": "a.safetensors",
            "intact": False,
            "num_tensors": 4,
            "tensor_bytes": 4036,
            "file_bytes": len(content),
            "damaged": ["model.head.weight"],
            "fault": None,
        },
    )


def test_verify_of_a_damaged_header(files, capsys):
    """A flipped byte of the header, or a missing end, is damage too."""
    content = (files / "a.safetensors").read_bytes()
    flipped = content.replace(b"encoder", b"encodes", 1)
    for damaged in (flipped, content[:-1], content[:300]):
        (files / "a.safetensors").write_bytes(damaged)
        status, out, err = run(capsys, "verify", "a.safetensors")
        assert (status, err) == (1, "")
        assert out.startswith("damaged: a.safetensors")
    assert json.loads(run(capsys, "verify", "a.safetensors", "--json")[1])["intact"] is False


@pytest.mark.parametrize("name", ["model.safetensors", "a.pt", "."])
def test_verify_of_files_without_digests(files, capsys, name):
    """What carries no digests cannot be verified: trouble, said on stderr."""
    assert run(capsys, "verify", name) == (
        2,
        "",
        f"tl-resume: {name}: carries no digests, only state files of tl-resume do\n",
    )


def test_verify_of_a_newer_file(files, capsys):
    """A file of a newer format is no damaged one."""
    content = (files / "a.safetensors").read_bytes().replace(b'\\"version\\":1', b'\\"version\\":9', 1)
    (files / "a.safetensors").write_bytes(content)
    status, out, err = run(capsys, "verify", "a.safetensors")
    assert (status, out) == (2, "")
    assert err == (
        "tl-resume: a.safetensors: was written by a newer version: its format is 9, this one reads up to 1\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nothing"], "tl-resume: nothing: No such file or directory\n"),
        (["diff", "a.pt", "nothing"], "tl-resume: nothing: No such file or directory\n"),
        (["diff", "a.pt", "text"], "tl-resume: text: neither a safetensors file nor one of torch.save\n"),
        (
            ["verify", "cut.safetensors"],
            "tl-resume: cut.safetensors: carries no digests, only state files of tl-resume do\n",
        ),
    ],
)
def test_trouble(files, capsys, arguments, message):
    """Status 2 and one line on stderr, which names the file."""
    (files / "text").write_text("hello, world")
    (files / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert run(capsys, *arguments) == (2, "", message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tl-resume: error: the following arguments are required: COMMAND\n"),
        (["diff", "a"], "tl-resume diff: error: the following arguments are required: B\n"),
        (
            ["diff", "a", "b", "--rtol", "-1"],
            "tl-resume diff: error: argument --rtol: must be a finite number of at least 0, got '-1'\n",
        ),
        (
            ["diff", "a", "b", "--atol", "x"],
            "tl-resume diff: error: argument --atol: must be a finite number of at least 0, got 'x'\n",
        ),
    ],
)
def test_wrong_usage(capsys, arguments, message):
    """Wrong usage is status 2, as argparse has it."""
    with pytest.raises(SystemExit) as caught:
        _cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(message)


def test_without_rich(files, capsys, monkeypatch):
    """Without rich the tables say how to install it, and --json works."""
    monkeypatch.setattr(_cli, "find_spec", lambda name: None)
    for arguments in (["show", "a.pt"], ["diff", "a.pt", "a.pt"], ["verify", "a.safetensors"]):
        assert run(capsys, *arguments) == (
            2,
            "",
            'tl-resume: tables need rich: pip install "tl-resume[cli]", or use --json\n',
        )
        assert run(capsys, *arguments, "--json")[0] == 0


def test_ctrl_c_is_no_traceback(files, capsys, monkeypatch):
    """Ctrl-C ends the program with the status that shells expect."""

    def interrupted(options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_cli, "_show", interrupted)
    assert run(capsys, "show", "a.pt") == (130, "", "")
