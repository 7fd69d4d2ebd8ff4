"""A loop that owns its control flow, run from one pause to the next."""

from __future__ import annotations

import contextvars
import gc
import random
import subprocess
import sys
import threading
import traceback
import weakref

import pytest
import torch

from tl_telemetry import SteppedLoop
from tl_telemetry._own_frames import with_own_frames

pytest.importorskip("greenlet")


def test_all_runs_in_order_from_pause_to_pause():
    """What is before a pause has run when ``advance`` returns, what is after it has not."""
    acts = []

    def train(pause):
        acts.append("first")
        pause()
        acts.append("second")
        pause()
        acts.append("last")

    loop = SteppedLoop(train)
    assert acts == []
    for expected in (["first"], ["first", "second"], ["first", "second", "last"]):
        loop.advance()
        assert acts == expected


def test_values_go_out_and_answers_come_in():
    """``advance`` returns what ``pause`` is given, and ``pause`` returns what the next ``advance`` is given."""
    answers = []

    def train(pause):
        for number in range(3):
            answers.append(pause(number))

    loop = SteppedLoop(train)
    assert [loop.advance("never asked for"), loop.advance("a"), loop.advance()] == [0, 1, 2]
    assert answers == ["a", None]


def test_the_result_is_kept():
    """Once the function has returned, the loop is over and has its result; the last ``advance`` returns None."""

    def train(pause):
        pause(1)
        return "trained"

    loop = SteppedLoop(train)
    assert (loop.advance(), loop.over, loop.result) == (1, False, None)
    assert loop.advance() is None
    assert (loop.over, loop.result) == (True, "trained")


def test_a_loop_that_is_over_cannot_be_advanced():
    """Another ``advance`` is an error after a return, an exception and a close alike."""

    def fail(pause):
        raise ZeroDivisionError

    returned, failed, closed = SteppedLoop(lambda pause: None), SteppedLoop(fail), SteppedLoop(lambda pause: pause())
    returned.advance()
    with pytest.raises(ZeroDivisionError):
        failed.advance()
    closed.close()
    for loop in (returned, failed, closed):
        assert loop.over
        with pytest.raises(RuntimeError) as error:
            loop.advance()
        assert str(error.value) == "the loop is over: it cannot be advanced any more"


def test_exceptions_pass_through_with_their_traceback():
    """What the function raises comes out of ``advance`` as it is, with the frames it was raised in."""
    raised = ValueError("bad batch")

    def deepest():
        raise raised

    def train(pause):
        pause()
        deepest()

    loop = SteppedLoop(train)
    loop.advance()
    with pytest.raises(ValueError, match="bad batch") as error:
        loop.advance()
    assert error.value is raised
    names = [frame.name for frame in traceback.extract_tb(raised.__traceback__)]
    assert names[-2:] == ["train", "deepest"]
    assert (loop.over, loop.result) == (True, None)


RAISES = """
import functools, torch
from tl_telemetry import SteppedLoop

def deeper(function, depth):
    for _ in range(depth):
        function = functools.partial(lambda inner: inner(), function)
    return function()

def train(pause):
    while True:
        pause()
        try:
            torch.ones(2, 3) @ torch.ones(2, 3)
        except RuntimeError as error:
            print(str(error)[:4])

loop = SteppedLoop(train)
deeper(loop.advance, 40)
for depth in (0, 3, 7, 20):
    sorted([3, 2, 1], key=lambda value: deeper(lambda: value, 3 * depth))
    max([1], key=lambda value: deeper(loop.advance, depth) or 0)
loop.close()
"""


def test_errors_of_torchs_are_raised_on_any_stack_of_the_callers():
    """torch walks up the native stack for each: without frames of its own, the process would die of it."""
    done = subprocess.run([sys.executable, "-c", RAISES], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["mat1"] * 4), done.stderr


def test_frames_of_its_own_do_not_show():
    """A traceback goes from the caller to the function without what lies between; results come back."""

    def fails():
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch") as error:
        with_own_frames(fails)
    names = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert names[1:] == ["with_own_frames", "run", "fails"]
    assert with_own_frames(lambda: 3) == 3


def test_exceptions_of_the_caller_stay_outside():
    """The function sees nothing of an exception that is handled around ``advance``, nor the caller of its own."""
    seen = []

    def train(pause):
        seen.append(sys.exc_info()[0])
        try:
            raise KeyError("inside")
        except KeyError:
            pause()
            seen.append(sys.exc_info()[0])

    loop = SteppedLoop(train)
    try:
        raise LookupError("outside")
    except LookupError:
        loop.advance()
        assert sys.exc_info()[0] is LookupError
    loop.advance()
    assert seen == [None, KeyError]


def test_close_runs_the_finally_blocks():
    """The function ends where it stands: context managers are left, and what comes after does not run."""
    acts = []

    def train(pause):
        try:
            pause()
            acts.append("went on")
        except Exception:  # noqa: BLE001  as broad as code can be
            acts.append("took it for an error")
        finally:
            acts.append("cleaned up")
        acts.append("after")

    loop = SteppedLoop(train)
    loop.advance()
    loop.close()
    assert acts == ["cleaned up"]
    assert loop.over
    loop.close()  # a second time, nothing happens
    assert acts == ["cleaned up"]


def test_close_of_a_loop_that_has_not_begun_runs_nothing():
    """A function that never started has nothing to clean up."""
    acts = []
    loop = SteppedLoop(lambda pause: acts.append("ran"))
    loop.close()
    assert acts == []
    assert loop.over


def test_a_pause_while_closing_ends_the_block_it_is_in():
    """A finally block that pauses after ``close`` ends there; the outer ones still run."""
    acts = []

    def train(pause):
        try:
            try:
                pause()
            finally:
                acts.append("inner")
                pause("nobody waits")
                acts.append("never")
        finally:
            acts.append("outer")

    loop = SteppedLoop(train)
    loop.advance()
    assert loop.close() is None
    assert acts == ["inner", "outer"]


def test_an_exception_while_closing_passes_through():
    """What a finally block raises comes out of ``close``."""

    def train(pause):
        try:
            pause()
        finally:
            raise OSError("disk full")

    loop = SteppedLoop(train)
    loop.advance()
    with pytest.raises(OSError, match="disk full"):
        loop.close()
    assert loop.over


def test_it_closes_as_a_context_manager():
    """Leaving the block closes the loop; an exception in the block passes."""
    acts = []

    def train(pause):
        try:
            pause()
        finally:
            acts.append("cleaned up")

    loop = SteppedLoop(train)
    with pytest.raises(KeyError, match="outside"), loop:
        raise KeyError(f"outside, {loop.advance()}")
    assert acts == ["cleaned up"]
    assert loop.over


def test_it_dies_with_its_last_user():
    """A loop that nobody holds ends at once, without a garbage collection: what it held is gone, blocks have run."""
    acts = []

    class Model:
        pass

    def train(pause):
        model = Model()
        models.append(weakref.ref(model))
        try:
            pause()
        finally:
            acts.append("cleaned up")

    models = []
    gc.disable()
    try:
        loop = SteppedLoop(train)
        loop.advance()
        assert models[0]() is not None
        del loop
        assert models[0]() is None
        assert acts == ["cleaned up"]
    finally:
        gc.enable()


def test_a_loop_that_something_holds_lives():
    """The test above can fail: another reference keeps the loop and what is in it."""

    def train(pause):
        model = torch.nn.Linear(1, 1)
        models.append(weakref.ref(model))
        pause()

    models = []
    held = [SteppedLoop(train)]
    held[0].advance()
    gc.collect()
    assert models[0]() is not None
    held.clear()
    assert models[0]() is None


def test_a_pause_from_outside_is_an_error():
    """``pause`` works only in the function itself, not in its caller nor in another loop."""
    kept = []

    def train(pause):
        kept.append(pause)
        pause()

    loop = SteppedLoop(train)
    loop.advance()
    message = "pause() was called outside of the function that SteppedLoop runs"
    with pytest.raises(RuntimeError) as error:
        kept[0]()
    assert str(error.value) == message
    other = SteppedLoop(lambda pause: kept[0]())
    with pytest.raises(RuntimeError) as error:
        other.advance()
    assert str(error.value) == message
    assert not loop.over


def test_loops_nest():
    """A loop may advance another one; each ``pause`` comes back to where its own loop was advanced."""

    def inner(pause):
        for number in range(2):
            pause(f"inner {number}")

    def outer(pause):
        loop = SteppedLoop(inner)
        pause(loop.advance())
        pause("outer")
        pause(loop.advance())

    loop = SteppedLoop(outer)
    assert [loop.advance() for _ in range(3)] == ["inner 0", "outer", "inner 1"]


def test_a_loop_goes_on_where_it_is_advanced_from():
    """A loop that was begun inside of another one may be advanced outside of it."""
    loops = []

    def train(pause):
        pause(1)
        pause(2)

    def begin(pause):
        loops.append(SteppedLoop(train))
        pause(loops[0].advance())

    outer = SteppedLoop(begin)
    assert outer.advance() == 1
    assert loops[0].advance() == 2
    outer.advance()
    assert outer.over
    loops[0].advance()
    assert loops[0].over


def test_two_loops_alternate():
    """Two loops of the same function do not mix their locals."""

    def train(pause, name):
        for number in range(2):
            pause((name, number))

    a, b = SteppedLoop(lambda pause: train(pause, "a")), SteppedLoop(lambda pause: train(pause, "b"))
    given = [loop.advance() for loop in (a, b, b, a)]
    assert given == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_it_runs_in_the_callers_thread():
    """The function runs in the thread that advances it, whichever that is."""
    threads = []

    def work():
        loop = SteppedLoop(lambda pause: (threads.append(threading.current_thread()), pause()))
        loop.advance()
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    work()
    assert threads == [thread, threading.current_thread()]


def test_random_streams_and_grad_mode_are_as_if_called():
    """The function draws from the caller's streams; what it sets of torch's modes is set in the caller as well."""

    def train(pause):
        drawn = []
        for _ in range(2):
            drawn.append((torch.rand(()).item(), random.random(), torch.is_grad_enabled()))
            pause()
        with torch.no_grad():
            pause()
        return drawn

    def called():
        drawn = []
        torch.manual_seed(3)
        random.seed(3)
        with torch.no_grad():
            drawn.append((torch.rand(()).item(), random.random(), torch.is_grad_enabled()))
        drawn.append((torch.rand(()).item(), random.random(), torch.is_grad_enabled()))
        return drawn

    state, python_state = torch.get_rng_state(), random.getstate()
    try:
        expected = called()
        after = torch.get_rng_state()
        torch.manual_seed(3)
        random.seed(3)
        loop = SteppedLoop(train)
        with torch.no_grad():
            loop.advance()
        loop.advance()
        assert torch.equal(torch.get_rng_state(), after)
        loop.advance()
        assert not torch.is_grad_enabled()  # the function stands in its no_grad()
        loop.advance()
        assert torch.is_grad_enabled()
        assert loop.result == expected
    finally:
        torch.set_rng_state(state)
        random.setstate(python_state)


def test_without_greenlet_it_says_what_to_install(monkeypatch):
    """The package is only needed here, and the error names the extra that brings it."""
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(ImportError) as error:
        SteppedLoop(lambda pause: None)
    assert str(error.value) == 'SteppedLoop needs the package greenlet: pip install "tl-telemetry[stepped]"'


def test_context_variables_are_the_callers():
    """The function sees what the caller has set, and sets nothing for the caller."""
    variable = contextvars.ContextVar("variable", default="default")
    variable.set("caller's")

    def train(pause):
        pause(variable.get())
        variable.set("function's")
        pause(variable.get())

    loop = SteppedLoop(train)
    assert (loop.advance(), loop.advance(), variable.get()) == ("caller's", "function's", "caller's")


@pytest.mark.parametrize("act", ["advance", "close"])
def test_another_thread_is_refused(act):
    """A loop that has begun goes on in its thread; the refusal of another one leaves it as it is."""
    loop = SteppedLoop(lambda pause: (pause(1), pause(2)))
    loop.advance()
    said = []

    def work():
        with pytest.raises(RuntimeError) as caught:
            getattr(loop, act)()
        said.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert said == ["the loop began in another thread: it can only be advanced and closed there"]
    assert (loop.over, loop.advance()) == (False, 2)
