"""What the crash check refuses, cannot judge, and leaves as it was."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tl_core import NotJudged, TrainingSetup
from tl_resume import assert_checkpoint_crash_safe, check_checkpoint_crash_safe
from tl_resume._crash import _check, _trial

spec = importlib.util.spec_from_file_location("crash_savers", Path(__file__).with_name("crash_savers.py"))
savers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(savers)


def check(save=savers.save_aside, load=savers.load, *, make_setup=savers.make_setup, step=savers.step, **options):
    options = {"crash_points": 1, **options}
    return check_checkpoint_crash_safe(make_setup, savers.make_data(), step, save=save, load=load, **options)


def reason(report):
    assert not report.judged
    assert not report.ok
    (note,) = report.notes
    assert note.rule == "not-judged"
    return note.seen.removeprefix("could not judge: ")


# arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 1}, ValueError, "steps must be at least 2, got 1"),
        ({"steps": 2.0}, TypeError, "steps must be an int, got float 2.0"),
        ({"crash_points": 0}, ValueError, "crash_points must be at least 1, got 0"),
        ({"crash_points": True}, TypeError, "crash_points must be an int, got bool True"),
        ({"load": None}, TypeError, "pass save and load together, got only save: load must fit to what save does"),
        ({"save": None}, TypeError, "pass save and load together, got only load: save must fit to what load does"),
        ({"save": "file"}, TypeError, "save must be a function save(setup, path), got str"),
        (
            {"load": lambda path: None},
            TypeError,
            "load must take the setup and a path, load(setup, path); got <lambda>(path)",
        ),
        ({"allow": "not-synced"}, TypeError, "allow must be a list of rules, got the string 'not-synced'"),
        (
            {"allow": ["fsync"]},
            ValueError,
            "allow names no rule of this check: 'fsync'; its rules are checkpoint-lost-in-crash, "
            "checkpoint-lost-on-full-disk, checkpoint-mixed, pointer-before-data, not-synced, save-fails-after-crash",
        ),
        (
            {"step": None},
            TypeError,
            "pass either step or loss_fn, got neither: step(setup, batch) trains, "
            "loss_fn(model, batch) only computes the loss",
        ),
        ({"step": 3}, TypeError, "step must be a function, got int"),
    ],
)
def test_arguments(options, error, message):
    """A wrong argument is named, with what was got and what is allowed."""
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check(**options)


def test_loss_fn():
    """loss_fn takes the place of step."""
    assert check(step=None, loss_fn=lambda model, batch: model(batch).square().mean()).ok


# exceptions from the given code


def fail(*args):
    raise ZeroDivisionError("mine")


def save_no_second(setup, path):
    if os.path.exists(path):
        fail()
    savers.save_aside(setup, path)


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (
            {"step": fail},
            "raised in step 0 of the training run; data was taken as a list of 4 batches",
        ),
        ({"save": fail}, "raised in save(), the first one, after 2 steps"),
        ({"save": save_no_second}, "raised in save(), the second one to the same path, after 4 steps"),
        ({"load": fail}, "raised in load() after the second save, which nothing disturbed"),
    ],
)
def test_exceptions_pass_through(options, note):
    """What the given code raises where nothing disturbs it passes through, with where it came from."""
    with pytest.raises(ZeroDivisionError, match=r"^mine") as caught:
        check(**options)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [note]


# what cannot be judged


def in_child():
    return os.getpid() != PARENT


PARENT = os.getpid()
kept = {}


def keep(setup, path):
    kept["model"] = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}


def save_only_once(setup, path):
    if not os.path.exists(path):
        savers.save_aside(setup, path)


def save_in_process(setup, path):
    savers.save_aside(setup, path)
    if in_child():
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(0.1); open({str(path)!r} + '.late', 'w')"])


def save_in_parent_only(setup, path):
    if in_child():
        raise OSError("no device")
    savers.save_aside(setup, path)


def end_in_child(setup, path):
    if in_child():
        print("begins\nstops")
        os.kill(os.getpid(), signal.SIGTERM)
    savers.save_aside(setup, path)


def load_nothing(setup, path):
    pass


def save_same(setup, path):
    torch.manual_seed(0)
    savers.save_aside(savers.make_setup(), path)


@pytest.mark.parametrize(
    ("save", "load", "expected"),
    [
        (keep, savers.load, "save() wrote nothing at the path that it was given, nor beside it"),
        (save_only_once, savers.load, "the second save() to the same path wrote nothing there"),
        (
            savers.save_in_thread,
            savers.load,
            "save() returns before it has written: the thread 'writer' goes on writing",
        ),
        (save_in_process, savers.load, "save() returns before it has written: a process goes on writing"),
        (
            save_in_parent_only,
            savers.load,
            "save() raises OSError: no device in a forked process, but not in this one",
        ),
        (end_in_child, savers.load, "save() ended its forked process by SIGTERM; the last that it printed is 'stops'"),
        (
            savers.save_aside,
            load_nothing,
            "load() changes nothing in a fresh setup, so a lost checkpoint cannot be told",
        ),
        (save_same, savers.load, "load() gives the same state after the save of step 4 as after that of step 2"),
    ],
)
def test_not_judged(save, load, expected):
    """A save that cannot be killed in a forked process, or a load that tells nothing, is not judged."""
    assert reason(check(save, load)) == expected


def test_not_judged_is_no_pass():
    """The assertion raises where nothing could be judged."""
    with pytest.raises(NotJudged) as caught:
        assert_checkpoint_crash_safe(savers.make_setup, savers.make_data(), savers.step, save=keep, load=savers.load)
    assert str(caught.value) == (
        "Crash-safe checkpoint: could not judge\n\nNotes:\n[not-judged] could not judge: "
        "save() wrote nothing at the path that it was given, nor beside it"
    )


def test_without_fork(monkeypatch):
    """Where processes cannot be forked nothing is judged."""
    monkeypatch.delattr(_check.os, "fork")
    monkeypatch.setattr(_check.sys, "platform", "elsewhere")
    assert reason(check()) == "the saves that die need os.fork, which elsewhere does not have"


def test_save_that_hangs(monkeypatch):
    """A save that does not end in a forked process is killed and not judged."""
    monkeypatch.setattr(_trial, "UNDISTURBED_LIMIT_S", 0.5)
    monkeypatch.setattr(_trial, "LIMIT_FACTOR", 0)

    def save(setup, path):
        if in_child():
            threading.Event().wait()
        savers.save_aside(setup, path)

    assert reason(check(save)) == "save() did not end within 0.5 s in a forked process"


# near misses of the judgement


class Meter:
    def __init__(self):
        self.total = 0.0


def test_parts_that_tell_no_state():
    """Objects without a state_dict, timers and what the checkpoint leaves out are no difference."""

    def make_setup():
        setup = savers.make_setup()
        setup = TrainingSetup(setup.model, setup.optimizers, state={"meter": Meter(), "lock": threading.Lock()})
        setup.started = time.monotonic()
        setup.other = Meter()
        return setup

    def load(setup, path):
        savers.load(setup, path)
        setup.loaded_at = time.monotonic()

    assert str(check(make_setup=make_setup, load=load)) == "Crash-safe checkpoint: passed"


def test_lazy_model():
    """A model whose parameters are made by the first batch, or by load, is judged."""

    def make_setup():
        model = nn.LazyLinear(16)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert str(check(make_setup=make_setup)) == "Crash-safe checkpoint: passed"


def test_time_of_the_save():
    """What each save of the same state saves differently is no difference, also where the new checkpoint is loaded."""

    def save(setup, path):
        setup.saved_at = time.monotonic()
        savers.write({**savers.content(setup), "time": setup.saved_at}, path.with_name("tmp"))
        os.replace(path.with_name("tmp"), path)
        savers.sync_folder(path.parent)
        path.with_name("lock").touch()
        path.with_name("lock").unlink()

    def load(setup, path):
        state = torch.load(path)
        savers.restore(setup, state)
        setup.saved_at = state["time"]

    assert str(check(save, load)) == "Crash-safe checkpoint: passed"


def test_mixture_in_plain_objects():
    """A counter in an object without a state_dict, and an attribute, count as parts of the state."""

    def make_setup():
        setup = TrainingSetup(savers.make_setup().model, {}, state={"meter": Meter()})
        setup.optimizers["sgd"] = torch.optim.SGD(setup.model.parameters(), lr=0.1)
        setup.epoch = 0
        return setup

    def step(setup, batch):
        setup.state["meter"].total += 1.5
        setup.epoch += 1
        loss = setup.model(batch).square().mean()
        loss.backward()
        setup.optimizer.step()

    def save(setup, path):
        os.makedirs(path, exist_ok=True)
        for name, text in (("total", setup.state["meter"].total), ("epoch", setup.epoch)):
            savers.write_text(str(text), f"{path}/{name}.tmp")
            os.replace(f"{path}/{name}.tmp", f"{path}/{name}")
        savers.sync_folder(path)

    def load(setup, path):
        setup.state["meter"].total = float(Path(path, "total").read_text())
        setup.epoch = int(Path(path, "epoch").read_text())

    (finding,) = check(save, load, make_setup=make_setup, step=step).findings
    assert finding.rule == "checkpoint-mixed"
    assert finding.seen.split("\n")[1] == (
        "killed after 0 of 1 bytes of checkpoint/epoch.tmp: load() returns without an error, "
        "but gives setup.epoch of step 2 and setup.state['meter'] of step 4"
    )
