from __future__ import annotations

import random
import subprocess
import sys

import numpy
import pytest
import torch

from tl_core import preserve_rng, seed_everything


def draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_one_seed_seeds_python_numpy_and_torch():
    """The same seed gives the same numbers everywhere, another seed others."""
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, "seed must be from 0 to 2**32 - 1, got -1"),
        (2**32, ValueError, "seed must be from 0 to 2**32 - 1, got 4294967296"),
        (1.0, TypeError, "seed must be an int, got float 1.0"),
        (True, TypeError, "seed must be an int, got bool True"),
    ],
)
def test_a_bad_seed_is_refused(seed, error, message):
    """A seed is an int that all generators take."""
    with pytest.raises(error) as caught:
        seed_everything(seed)
    assert str(caught.value) == message


def test_the_generators_are_put_back():
    """What the block draws and seeds leaves no trace."""
    seed_everything(0)
    expected = draw()
    seed_everything(0)
    with preserve_rng():
        seed_everything(9)
        draw()
    assert draw() == expected


def test_without_the_block_the_generators_move():
    """The test above can fail: the same drawing unguarded changes what comes next."""
    seed_everything(0)
    expected = draw()
    seed_everything(0)
    seed_everything(9)
    draw()
    assert draw() != expected


def test_the_generators_are_put_back_after_an_error():
    """An error passes through, and the generators are where they were."""
    seed_everything(0)
    expected = draw()
    seed_everything(0)
    with pytest.raises(KeyError), preserve_rng():
        raise KeyError(draw())
    assert draw() == expected


def test_blocks_nest():
    """An inner block puts back what the outer one goes on with."""
    seed_everything(0)
    expected = draw()
    seed_everything(0)
    with preserve_rng():
        seed_everything(1)
        inside = draw()
        seed_everything(1)
        with preserve_rng():
            draw()
        assert draw() == inside
    assert draw() == expected


@pytest.fixture
def seeds(monkeypatch):
    """A CUDA that is there but not initialised, and the seeds that it is given."""
    given = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", given.append)
    return given


def test_an_accelerator_that_waits_gets_its_seed_back(seeds):
    """What was seeded inside, before the device is initialised, is seeded as before afterwards."""
    torch.manual_seed(5)
    with preserve_rng():
        seed_everything(9)
    assert seeds == [5, 9, 5]
    assert torch.initial_seed() == 5


def test_an_accelerator_that_nobody_touched_is_left_alone(seeds):
    """Without a seed inside, none is given afterwards."""
    with preserve_rng():
        torch.rand(())
    assert seeds == []


def test_an_initialised_accelerator_gets_its_state_back(monkeypatch):
    """The states of all devices are read before and written after."""
    written = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["state"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", written.append)
    with preserve_rng():
        assert written == []
    assert written == [["state"]]


def run_without_numpy(code: str) -> str:
    blocked = "import sys; sys.modules['numpy'] = None\nimport warnings; warnings.simplefilter('ignore')\n"
    return subprocess.run(
        [sys.executable, "-c", blocked + code], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_numpy_is_not_needed():
    """Seeding and putting back work where numpy cannot be imported."""
    code = (
        "import torch, tl_core\n"
        "tl_core.seed_everything(0)\n"
        "with tl_core.preserve_rng(): torch.rand(())\n"
        "a = torch.rand(()); tl_core.seed_everything(0)\n"
        "print(bool(a == torch.rand(())))\n"
    )
    assert run_without_numpy(code) == "True\n"
