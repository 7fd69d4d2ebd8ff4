"""The run: its records, what they say, and the assertions on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tl_core import Finding, Report, TrainingSetup
from tl_telemetry import _lr
from tl_telemetry._current_step import CurrentStep
from tl_telemetry._evidence import Evidence
from tl_telemetry._export import rows
from tl_telemetry._facts import Facts
from tl_telemetry._judge import CHECK, EXPLAINS, Explains, detail, judge, not_judged
from tl_telemetry._options import Options, as_count, as_number, as_patterns, as_positive, as_update_counts, rule_ids
from tl_telemetry._record import StepRecord, num_examples
from tl_telemetry._rules import Rule, bounds, horizon, steps, unstepped, updates
from tl_telemetry._table import render


class TrainingRun:
    """What was observed of a loop, and the assertions on it; each returns the run, so that they chain.

    The first look at a figure waits for the device; recording did not.

    Attributes:
        error: the exception that ended the run, where ``run_training`` was told to catch it; else None.
    """

    def __init__(self, facts: Facts | None, *, allow: Iterable[str] = ()) -> None:
        self._facts = facts
        self.error: BaseException | None = None
        self._allow = rule_ids(allow, "allow")
        self._report: Report | None = None
        self._adopted: Report | None = None
        self._planned: dict[str, int] = {}
        self._in_step = False

    def __repr__(self) -> str:
        return f"TrainingRun({self.summary().splitlines()[0]})"

    @property
    def facts(self) -> Facts:
        """How things stood at the start and at the end, beside the records."""
        assert self._facts is not None  # a LateRun has its own
        return self._facts

    @property
    def setup(self) -> TrainingSetup:
        """The observed setup, as the loop left it."""
        return self.facts.setup

    @property
    def records(self) -> list[StepRecord]:
        """One record a step, in order."""
        return self.facts.recorder.records

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[CurrentStep]:
        """Make one record of what happens inside.

        Args:
            batch: the step's batch, for the record's ``num_examples``; it is only looked at.
        """
        if self.facts.over:
            raise RuntimeError("run.step() must be used inside of the block that observes: this run is over")
        if self._in_step:
            raise RuntimeError("run.step() was entered inside of a run.step() block: a step has one record")
        current = CurrentStep(len(self.records))
        self.facts.recorder.open_step(num_examples(batch))
        self._in_step = True
        try:
            yield current
        finally:
            self._in_step = False
            self.facts.recorder.close_step(current._losses, current._main_loss)

    # -- what was seen ------------------------------------------------------------------------------------------

    @property
    def losses(self) -> list[float]:
        """The main loss of each step that returned one."""
        return [record.loss for record in self.records if record.loss is not None]

    @property
    def initial(self) -> float:
        """The first step's main loss (NaN without one)."""
        return next(iter(self.losses), math.nan)

    @property
    def final(self) -> float:
        """The last step's main loss (NaN without one)."""
        return next(iter(self.losses[-1:]), math.nan)

    @property
    def watch_time_s(self) -> float:
        """Host time in seconds that watching took, over all steps so far."""
        return self.facts.recorder.watch_s

    def table(self, around: Sequence[int] | None = None, *, width: int | None = None) -> str:
        """Return the steps as a table; a long run is folded around ``around``, its ends and its extremes.

        Args:
            around: telling steps, shown with their neighbours.
            width: columns of text at the most; the losses beside the main one, then the updates are left out to fit.
                None: everything is shown.
        """
        return render(self.records, around, width)

    def summary(self) -> str:
        """Return the run in a few lines: steps, losses, updates, what data was taken for, what watching cost."""
        count = len(self.records)
        # the loop may have taken optimizers out of the setup, or stepped others
        names = dict.fromkeys([*self.setup.optimizers, *(n for record in self.records for n in record.optimizer_steps)])
        updates = ", ".join(f"{name} {self._num_updates(name)}" for name in names)
        if unfollowed := self.facts.recorder.steppers.num_unfollowed:
            updates += f", further optimizers that hold nothing of the setup {unfollowed} (not followed)"
        losses = f", loss {self.initial:.4g} to {self.final:.4g}" if self.losses else ""
        lines = [f"{count} step{'' if count == 1 else 's'}{losses}, updates: {updates or 'none'}"]
        if self.facts.data_form:
            lines.append(f"data: {self.facts.data_form}")
        if count:
            lines.append(f"watching took {1e3 * self.watch_time_s / count:.2f} ms a step on the host")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dict a step, ready for ``pandas.DataFrame``."""
        return rows(self.records)

    def to_jsonl(self, path: str | Path) -> None:
        """Write the rows as JSON Lines, with the per-parameter figures under ``parameters``; NaN and Inf as strings."""
        records = self.records
        with open(path, "w", encoding="utf-8") as file:
            for row in rows(records, parameters=True):
                file.write(json.dumps(row, allow_nan=False) + "\n")

    def _num_updates(self, name: str) -> int:
        return sum(record.optimizer_steps.get(name, 0) for record in self.records)

    # -- the verdict --------------------------------------------------------------------------------------------

    def check(
        self,
        *,
        max_grad_norm: float | None = None,
        min_relative_decrease: float | None = None,
        every: int | None = None,
        max_skipped: int = 0,
        num_updates: int | dict[str, int] | None = None,
        frozen: Sequence[str] = (),
        ignore: Sequence[str] = (),
        allow: Iterable[str] = (),
        strict: Iterable[str] = (),
    ) -> Report:
        """Judge the run by all rules and return the report; the arguments are those of ``assert_healthy``."""
        options = Options(
            max_grad_norm=as_positive(max_grad_norm, "max_grad_norm"),
            min_relative_decrease=as_number(min_relative_decrease, "min_relative_decrease"),
            every=None if every is None else as_count(every, "every", least=1),
            max_skipped=as_count(max_skipped, "max_skipped", least=0),
            frozen=as_patterns(frozen, "frozen"),
            ignore=as_patterns(ignore, "ignore"),
            allow=self._allow | rule_ids(allow, "allow"),
            strict=rule_ids(strict, "strict"),
            num_updates=self._plan(num_updates),
        )
        return judge(Evidence(self.facts, options))

    def judge(
        self,
        rules: Iterable[Rule],
        *,
        check: str,
        notes: Iterable[str] = ("not-judged",),
        allow: Iterable[str] = (),
        strict: Iterable[str] = (),
        explains: Explains | None = None,
        every: int | None = None,
    ) -> Report:
        """Judge the run by rules of somebody else's.

        Args:
            rules: functions of the run's ``Evidence`` that yield findings, causes before their consequences. One that
                raises becomes a note ``not-judged``.
            check: the check's name, for the report.
            notes: ids whose findings are notes; the verdict's own ``not-judged`` should be among them.
            allow: ids of rules that may be broken.
            strict: ids of notes that count as findings.
            explains: by a rule's id, the ids of the findings that follow from its own, and that it hides unless they
                name parameters which it does not. None: as the training run's rules.
            every: an update is due in every ``every``-th step. None recognises accumulation by itself.
        """
        options = Options(
            every=None if every is None else as_count(every, "every", least=1),
            allow=frozenset(allow),
            strict=frozenset(strict),
        )
        explains = EXPLAINS if explains is None else explains
        return judge(Evidence(self.facts, options), rules, check=check, notes=notes, explains=explains)

    def _plan(self, num_updates: int | dict[str, int] | None) -> dict[str, int]:
        if num_updates is None:
            return self._planned
        planned = as_update_counts(num_updates, "num_updates", self.setup.optimizers)
        for name, count in planned.items():
            if count < (made := self._num_updates(name)):
                raise ValueError(f"num_updates is that of the whole training, got {count}; {name!r} made {made} so far")
        return planned

    def evidence(self) -> Evidence:
        """Return the run's evidence without any option, for somebody else's rules."""
        return Evidence(self.facts, Options())

    def adopt(self, report: Report) -> None:
        """Take the verdict of the check that made this run: ``report``, ``findings``, ``notes`` and ``ok`` are its."""
        self._adopted = report

    @property
    def report(self) -> Report:
        """The verdict without any option, or that of the check that made this run."""
        if self._adopted is not None:
            return self._adopted
        if not self.facts.over:
            return self.check()
        if self._report is None:
            self._report = self.check()
        return self._report

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the rules found, without any option."""
        return self.report.findings

    @property
    def notes(self) -> tuple[Finding, ...]:
        """What is worth knowing and may be meant."""
        return self.report.notes

    @property
    def ok(self) -> bool:
        """Whether the run was judged and nothing was found."""
        return self.report.ok

    def assert_healthy(
        self,
        max_grad_norm: float | None = None,
        min_relative_decrease: float | None = None,
        *,
        every: int | None = None,
        max_skipped: int = 0,
        num_updates: int | dict[str, int] | None = None,
        frozen: Sequence[str] = (),
        ignore: Sequence[str] = (),
        allow: Iterable[str] = (),
        strict: Iterable[str] = (),
    ) -> TrainingRun:
        """Demand that no rule finds anything.

        Args:
            max_grad_norm: bound on each optimizer's total L2 gradient norm, before clipping. None: no bound.
            min_relative_decrease: by how much the mean loss of the last quarter of the steps must lie below the first
                quarter's, relative to it (0.1 is 10 %). None: the loss is no judge.
            every: an update is due in every ``every``-th step. None recognises accumulation by itself.
            max_skipped: how many due updates may be missing.
            num_updates: how many updates the whole training makes, of which this run may be a part, for every optimizer
                or by optimizer name: schedules that end before or after it are noted. None: what ``assert_num_updates``
                has demanded, if it was called.
            frozen: patterns (fnmatch) of parameters and buffers that must not change.
            ignore: patterns of parameters that are left out.
            allow: ids of rules that may be broken.
            strict: ids of rules whose notes count as findings.

        Raises:
            CheckFailed: there are findings.
            NotJudged: nothing could be judged.
            TypeError, ValueError: an argument is not what is allowed, or a pattern matches nothing.
        """
        self.check(
            max_grad_norm=max_grad_norm,
            min_relative_decrease=min_relative_decrease,
            every=every,
            max_skipped=max_skipped,
            num_updates=num_updates,
            frozen=frozen,
            ignore=ignore,
            allow=allow,
            strict=strict,
        ).require()
        return self

    def assert_finite(self) -> TrainingRun:
        """Demand finite losses, applied gradients and final parameters."""
        return self._require(Options(), bounds.non_finite)

    def assert_no_skipped_updates(self, every: int | None = None, max_skipped: int = 0) -> TrainingRun:
        """Demand an update in every ``every``-th step, and that updates change parameters.

        Args:
            every: an update is due in every ``every``-th step; ``1`` demands one in each. None recognises accumulation
                by itself, and lets a GradScaler skip up to half of the updates while it adapts.
            max_skipped: how many due updates may be missing.
        """
        options = Options(
            every=None if every is None else as_count(every, "every", least=1),
            max_skipped=as_count(max_skipped, "max_skipped", least=0),
        )
        return self._require(
            options,
            steps.skipped_update,
            unstepped.never_stepped,
            steps.step_without_gradient,
            updates.no_update,
            updates.lr_zero,
            judged=lambda run: bool(run.steps or run.overflows) if every is None else len(run.records) >= every,
        )

    def assert_grad_norm_below(self, max_norm: float) -> TrainingRun:
        """Demand that each optimizer's total L2 gradient norm, before clipping, stays at or below ``max_norm``."""
        options = Options(max_grad_norm=as_positive(max_norm, "max_norm", needed=True))
        return self._require(options, bounds.grad_norm_exceeded, judged=lambda run: bool(run.steps))

    def assert_loss_decreases(self, min_relative_decrease: float = 0.1) -> TrainingRun:
        """Demand that the mean loss of the last quarter of the steps lies this much below the first quarter's."""
        wanted = as_number(min_relative_decrease, "min_relative_decrease", needed=True)
        return self._require(
            Options(min_relative_decrease=wanted),
            bounds.loss_not_decreasing,
            judged=lambda run: sum(record.loss is not None for record in run.records) > 1,
        )

    def assert_lr(
        self,
        expected: Callable[[int], float] | Sequence[float],
        optimizer: str | None = None,
        group: int = 0,
        *,
        rtol: float = 1e-6,
    ) -> TrainingRun:
        """Demand the learning rates that a schedule should give, as used by the steps.

        Args:
            expected: a function from the step index to the rate, or a list as long as the run.
            optimizer: the optimizer's name; needed when the setup has several.
            group: the parameter group.
            rtol: relative tolerance.

        Raises:
            CheckFailed: a rate differs; the message says which shift, factor or unit would explain it.
        """
        return self._require(Options(), lambda run: _lr.compare(run, expected, optimizer, group, rtol))

    def assert_num_updates(self, expected: int | dict[str, int]) -> TrainingRun:
        """Demand how often optimizers stepped in the whole run.

        Every later verdict on the run, once it is over, compares its schedules with that number, as with
        ``check(num_updates=expected)``.

        Args:
            expected: the number for every optimizer of the setup, or numbers by optimizer name, as ``num_updates(...)``
                counts them.

        Raises:
            CheckFailed: there were more or fewer; the message says what the run shows of the cause.
        """
        wanted = as_update_counts(expected, "expected", self.setup.optimizers)
        self._require(Options(), lambda run: steps.update_count(run, wanted))
        if self.facts.over and not horizon.stepped_before(Evidence(self.facts, Options())):
            self._planned, self._report = wanted, None
        return self

    def _require(
        self,
        options: Options,
        *rules: Callable[[Evidence], Iterator[Finding]],
        judged: Callable[[Evidence], bool] = lambda run: True,
    ) -> TrainingRun:
        evidence = Evidence(self.facts, options)
        findings = tuple(f for rule in rules for f in rule(evidence) if f.rule not in self._allow)
        if not self.records or not (findings or judged(evidence)):
            Report(CHECK, notes=tuple(not_judged(evidence)), judged=False).require()
        Report(CHECK, findings, detail=detail(self.records, findings)).require()
        return self
