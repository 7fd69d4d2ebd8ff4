"""The accumulation check, on the Trainer's own ``gradient_accumulation_steps``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import Trainer

from tl_core import TrainingSetup
from tl_hf._feed import Feed
from tl_hf._fit import Fit
from tl_hf._made import made_by
from tl_hf._setup import setup_of

if TYPE_CHECKING:
    from tl_accum import AccumulationReport


class _Runs:
    """The trainings of one check: one at a time, built for the accumulation steps that were asked for last."""

    def __init__(self, make_trainer: Callable[[int], Trainer], epoch: Callable[[int], int]) -> None:
        self._make_trainer = make_trainer
        self._epoch = epoch
        self.accumulation_steps = 1
        self._fits: WeakKeyDictionary[TrainingSetup, tuple[Fit, Feed]] = WeakKeyDictionary()
        self._running: Fit | None = None

    def make_setup(self) -> TrainingSetup:
        self.close()
        k = self.accumulation_steps
        trainer = made_by(self._make_trainer, k)
        feed = Feed(self._epoch(k))
        trainer.get_train_dataloader = lambda: feed
        self._running = Fit(trainer, micro_batches=True)
        setup = setup_of(trainer)
        self._fits[setup] = self._running, feed
        return setup

    def begin_group(self, setup: TrainingSetup, batches: list[Any], accumulation_steps: int) -> None:
        fit, feed = self._fits[setup]
        fit.trainer.args.gradient_accumulation_steps = accumulation_steps
        feed.waiting.clear()
        feed.waiting.extend(batches)
        feed.waiting.extend(batches[-1:] * (accumulation_steps - len(batches)))

    def step(self, setup: TrainingSetup) -> Any:
        fit, _ = self._fits[setup]
        loss = fit.advance()
        if fit.over:
            raise ValueError("over")
        return loss

    def close(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.close()


def check_hf_accumulation_equivalent(
    make_trainer: Callable[[int], Trainer],
    data: Any = None,
    *,
    accumulation_steps: int = 4,
    cycles: int = 2,
    epoch_length: int | None = None,
    split: Callable[[Any, int], Any] | None = None,
    disable_dropout: bool = True,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> AccumulationReport:
    from tl_accum import check_accumulation_equivalent

    def epoch(k):
        if epoch_length is None:
            return (cycles + 2) * k
        whole = -(-epoch_length // accumulation_steps)
        return whole if k == 1 else epoch_length

    runs = _Runs(make_trainer, epoch)

    def make_step(k: int) -> Any:
        runs.accumulation_steps = k

        def step(setup: TrainingSetup, batch: Any) -> Any:
            return runs.step(setup)

        step.begin_group = lambda setup, batches: runs.begin_group(setup, batches, k)
        return step

    try:
        return check_accumulation_equivalent(runs.make_setup, data, make_step, accumulation_steps=accumulation_steps, cycles=cycles, epoch_length=epoch_length, split=split, disable_dropout=disable_dropout, seed=seed, rtol=rtol, atol=atol, allow=allow)
    finally:
        runs.close()
