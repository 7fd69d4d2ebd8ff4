"""Which decisions are only about output: the branches that a loop takes to show something."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch

from tl_resume._check._output import decides_about_output
from tl_resume._check._tracked import Decision, Decisions, track

logger = logging.getLogger(__name__)
wandb: Any = None


# -- functions that decide: the value goes into what training does ------------------------------------------------
# Each has a comment `# here` on the line that decides.


def stops_by_exception(s: Any, loss: float) -> None:
    if s.bad > 3:  # here
        print("stopping")
        raise StopIteration


def sets_a_stop_flag(s: Any, loss: float) -> None:
    if s.bad > 3:  # here
        s.stop = True


def lowers_the_rate(s: Any, loss: float) -> None:
    if s.bad > 3:  # here
        print("lowering")
        for group in s.optimizer.param_groups:
            group["lr"] *= 0.1


def flushes_a_buffer(s: Any, loss: float) -> None:
    s.buffer.append(loss)
    if s.count >= 4:  # here
        s.optimizer.step()
        s.buffer.clear()


def unfreezes(s: Any, loss: float) -> None:
    if s.count == 100:  # here
        for parameter in s.model.parameters():
            parameter.requires_grad_(True)


def counts_bad_steps(s: Any, loss: float) -> None:
    if loss < s.best:  # here
        s.best = loss
        s.bad = 0
    else:
        s.bad += 1


def uses_a_variable_later(s: Any, loss: float) -> float:
    weight = 1.0
    if s.count > 100:  # here
        weight = 0.5
    return weight * loss


def returns_before_the_update(s: Any, loss: float) -> None:
    if s.count % 4:  # here
        return
    s.optimizer.step()


def continues_before_the_update(s: Any, losses: list[float]) -> None:
    for _ in losses:
        if s.count < 10:  # here
            continue
        s.optimizer.step()


def returns_another_value(s: Any, loss: float) -> float | None:
    if s.count > 10:  # here
        return 0.0
    return None


def chooses_in_one_line(s: Any, loss: float) -> float:
    return loss if s.count > 10 else 0.0  # here


# fmt: off
def steps_in_one_line(s: Any, loss: float) -> None:
    if s.count > 10: s.optimizer.step()  # here  # noqa: E701
# fmt: on


def loops_while(s: Any, loss: float) -> None:
    while s.count > 3:  # here
        s.count -= 1


def asserts(s: Any, loss: float) -> None:
    assert s.count > 3  # here


def passes_a_condition(s: Any, loss: float) -> None:
    s.model.freeze(s.count > 3)  # here


def logs_and_steps(s: Any, loss: float) -> None:
    if s.count % 10 == 0:  # here
        logger.info("step %d", s.count)
        s.scheduler.step()


def sets_a_phase(s: Any, loss: float) -> None:
    if s.count > 5:  # here
        s.phase = "late"


def decides_inside_of_a_with(s: Any, loss: float) -> None:
    with torch.no_grad():
        if s.count > 3:  # here
            s.average.copy_(s.model.weight)


def decides_in_a_nested_function(s: Any, loss: float) -> None:
    def hook(_: Any) -> Any:
        if s.count > 3:  # here
            s.optimizer.step()

    hook(None)


# -- functions that only show something ---------------------------------------------------------------------------


def prints_every_ten(s: Any, loss: float) -> None:
    if s.count % 10 == 0:  # here
        print(s.count, loss)
    s.optimizer.step()


# fmt: off
def prints_in_one_line(s: Any, loss: float) -> None:
    if s.count > 3: print(loss)  # here  # noqa: E701
# fmt: on


def logs_since_the_last(s: Any, loss: float) -> None:
    if s.count - s.last > 10:  # here
        logger.info("loss %.3f", loss)
        s.last = s.count


def resets_meters(s: Any, loss: float) -> None:
    if s.count >= 10:  # here
        print(s.total / s.count)
        s.total, s.count = 0.0, 0


def empties_a_window(s: Any, loss: float) -> None:
    s.window.append(loss)
    if s.count > 10:  # here
        mean = sum(s.window) / len(s.window)
        wandb.log({"loss": mean})
        s.window = []


def skips_the_first_steps(s: Any, loss: float) -> None:
    if s.count < 5:  # here
        return
    print(loss)


def skips_steps_in_a_loop(s: Any, losses: list[float]) -> None:
    for loss in losses:
        if s.count % 5:  # here
            continue
        print(loss)


def shows_one_or_the_other(s: Any, loss: float) -> None:
    if s.count > 5:  # here
        print("late", loss)
    else:
        print("early", loss)


def shows_more_inside(s: Any, loss: float) -> None:
    if s.count > 5:  # here
        if loss > 3:
            print("high")
        for name in ("a", "b"):
            print(name)


def averages_itself(s: Any, loss: float) -> None:
    s.average = loss if s.average == 0 else 0.9 * s.average + 0.1 * loss  # here


def keeps_the_peak(s: Any, loss: float) -> None:
    s.peak = max(s.peak, loss)  # here


def prints_a_condition(s: Any, loss: float) -> None:
    print("late" if s.count > 5 else "early")  # here


def makes_a_text(s: Any, loss: float) -> None:
    text = ""
    if s.count > 5:  # here
        text = f"late: {loss}"
    print(text)


def draws_a_curve(s: Any, loss: float) -> None:
    if s.count % 10 == 0:  # here
        s.writer.add_scalar("loss", loss, s.count)
        s.writer.flush()


def describes_a_bar(s: Any, loss: float) -> None:
    if s.count % 10 == 0:  # here
        s.bar.set_postfix(loss=loss)


def does_nothing(s: Any, loss: float) -> None:
    if s.count > 5:  # here
        pass


def shows_in_a_nested_function(s: Any, loss: float) -> None:
    def show() -> None:
        if s.count > 3:  # here
            print(loss)

    show()


DECIDING: list[Callable[..., Any]] = [
    *(stops_by_exception, sets_a_stop_flag, lowers_the_rate, flushes_a_buffer, unfreezes, counts_bad_steps),
    *(uses_a_variable_later, returns_before_the_update, continues_before_the_update, returns_another_value),
    *(chooses_in_one_line, steps_in_one_line, loops_while, asserts, passes_a_condition, logs_and_steps),
    *(sets_a_phase, decides_inside_of_a_with, decides_in_a_nested_function),
]
SHOWING: list[Callable[..., Any]] = [
    *(prints_every_ten, prints_in_one_line, logs_since_the_last, resets_meters, empties_a_window),
    *(skips_the_first_steps, skips_steps_in_a_loop, shows_one_or_the_other, shows_more_inside, averages_itself),
    *(keeps_the_peak, prints_a_condition, makes_a_text, draws_a_curve, describes_a_bar, does_nothing),
    shows_in_a_nested_function,
]

# What a branch may set: the value that decides, and what was lost beside it and decides nothing by itself.
LOST = {
    logs_since_the_last: frozenset(["count", "last"]),
    resets_meters: frozenset(["count", "total"]),
    averages_itself: frozenset(["average"]),
    empties_a_window: frozenset(["count", "window"]),
}


def codes(code: CodeType) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(found for one in inner for found in codes(one))]


def judged(function: Callable[..., Any], idle: frozenset[str] = frozenset()) -> set[bool | None]:
    """Judge the line with the comment ``# here``, with and without its column."""
    path, first = function.__code__.co_filename, function.__code__.co_firstlineno
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    line = next(number for number, text in enumerate(lines[first - 1 :], first) if "# here" in text)
    (code,) = [c for c in codes(function.__code__) if any(number == line for *_, number in c.co_lines())][-1:]
    text = lines[line - 1]
    column = text.index("s.", len(text) - len(text.lstrip()) + 1)
    return {decides_about_output(code, line, at, idle) for at in (None, column)}


@pytest.mark.parametrize("function", DECIDING, ids=lambda function: function.__name__)
def test_what_goes_into_training_is_a_decision(function: Callable[..., Any]) -> None:
    """Stops, rates, flushes, frozen parts, counters, variables used later, returns before an update."""
    assert judged(function) == {False}


@pytest.mark.parametrize("function", SHOWING, ids=lambda function: function.__name__)
def test_what_only_shows_is_output(function: Callable[..., Any]) -> None:
    """Prints, logs, meters, windows, curves, skipped first steps, averages and peaks of their own."""
    assert judged(function, LOST.get(function, frozenset())) == {True}


@pytest.mark.parametrize("function", LOST, ids=lambda function: function.__name__)
def test_a_branch_that_begins_anew_what_is_not_lost_decides(function: Callable[..., Any]) -> None:
    """A sum or window that the checkpoint carries is begun anew at another step: that is more than output."""
    assert judged(function) == {False}


def test_setting_what_decides_nothing_is_output() -> None:
    """A branch may set attributes by which nothing is decided; the same branch decides where one of them counts."""
    assert judged(counts_bad_steps) == {False}
    assert judged(counts_bad_steps, frozenset(["best", "bad"])) == {True}
    assert judged(counts_bad_steps, frozenset(["best"])) == {False}
    assert judged(sets_a_stop_flag, frozenset(["stop"])) == {True}


def test_code_without_source_is_not_judged() -> None:
    """Executed text and a lambda in a dict have no statement to be found: nothing is said."""
    code = compile("def f(s):\n    if s.count > 3:\n        raise StopIteration\n", "<made up>", "exec")
    assert decides_about_output(codes(code)[1], 2, 7, frozenset()) is None
    held = {
        "late": lambda count: count > 3,  # a line that is no statement
    }
    code = held["late"].__code__
    assert decides_about_output(code, code.co_firstlineno, None, frozenset()) is None


def seen(function: Callable[..., Any], *arguments: Any) -> Decision:
    decisions = Decisions()
    function(*(track(argument, decisions, frozenset(["x"])) for argument in arguments))
    (decision,) = decisions.seen
    return decision


# fmt: off
def two_on_a_line(count: int) -> bool:
    if count > 3: print("a")  # noqa: E701
    return True
# fmt: on


def test_the_place_that_a_tracked_value_notes_is_understood() -> None:
    """Line and column of a noted decision lead to its statement, in indented code too."""

    class Inner:
        def stops(self, count: int) -> None:
            if count > 3:
                raise StopIteration

        def shows(self, count: int) -> None:
            if count > 3:
                print("late")

    with pytest.raises(StopIteration):
        Inner().stops(5)
    late = lambda count: count > 3  # noqa: E731
    for function, expected in ((Inner().shows, True), (two_on_a_line, True), (late, False)):
        found = seen(function, 5)
        assert decides_about_output(found.code, found.line, found.column, frozenset()) is expected
