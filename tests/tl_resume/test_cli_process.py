from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
import torch

from tl_resume._format import write_state


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A state file in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_state("a.safetensors", {"model": {"weight": torch.ones(2, 3)}, "epoch": 3})


def command(*arguments):
    return [sys.executable, "-c", "import sys; from tl_resume._cli import main; sys.exit(main())", *arguments]


def test_help_needs_no_torch():
    """--help and --version answer without importing torch; a comparison does import it."""
    code = "import sys\nfrom tl_resume._cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules)"
    for arguments, torch_is_there in (["--help"], False), (["--version"], False), (["show", "nothing"], True):
        ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert ran.stdout.splitlines()[-1] == str(torch_is_there)


def test_json_does_not_import_rich(file):
    """--json must work where rich is broken, too."""
    code = "import sys; sys.modules['rich'] = None; from tl_resume._cli import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", code, "show", "a.safetensors", "--json"], capture_output=True, check=True
    )
    assert json.loads(ran.stdout)["num_tensors"] == 1


def test_no_name_is_broken_in_a_pipe(file):
    """However narrow the terminal, a pipe gets whole lines without colours."""
    name = "model.layers.0." + "very_long_name_of_a_module." * 8 + "weight"
    write_state("long.safetensors", {"model": {name: torch.ones(1), "b": torch.ones(1)}})
    environment = {**os.environ, "COLUMNS": "40"}
    ran = subprocess.run(command("show", "long.safetensors"), capture_output=True, text=True, env=environment)
    assert name in ran.stdout
    assert "\x1b" not in ran.stdout


def in_terminal(*arguments):
    """Run in a terminal, and return what it was sent."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command(*arguments), stdout=child, env=environment)
    os.close(child)
    sent = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        sent += part
    os.close(parent)
    assert process.wait() == 0
    return sent.decode()


def test_colours_in_a_terminal(file):
    """A terminal gets the same text with colours."""
    sent = in_terminal("diff", "a.safetensors", "a.safetensors")
    assert sent.startswith("\x1b[1;32msame: 1 tensor, 1 plain value\x1b[0m\r\n")


def test_a_closed_pipe_is_no_traceback(file):
    """When who reads has seen enough, the program ends silently."""
    process = subprocess.Popen(
        command("show", "a.safetensors", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 2)
    process.stderr.close()


def test_names_that_the_output_cannot_encode(file):
    """A name outside of the output's encoding is escaped."""
    write_state("n.safetensors", {"model": {"größe": torch.ones(1)}})
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command("show", "n.safetensors"), capture_output=True, text=True, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in ran.stdout
