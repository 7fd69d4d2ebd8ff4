"""What watching a real Trainer costs: batches of two Trainers, one of them watched, take turns in one process.

Run it with ``hatch run bench-frameworks``. Each Trainer is stopped after every batch, so that single batches can take
turns, as single steps do in ``telemetry_overhead.py``, whose columns these are. In a ``control`` row no one is watched.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any

import lightning.pytorch as lightning
import torch
from telemetry_overhead import WARMUP_STEPS, Result, language_loss, small_transformer, table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from tl_core import seed_everything
from tl_hf import make_hf_trainer, watch_hf
from tl_lightning import make_lightning_trainer, watch_lightning
from tl_telemetry import SteppedLoop, TrainingRun, _taps

Train = Callable[[Callable[..., Any], Callable[..., Any]], Any]


class LitModel(lightning.LightningModule):
    """The transformer of the other benchmark."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.batch = small_transformer()

    def training_step(self, batch: Tensor) -> Tensor:
        return language_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class HFModel(nn.Module):
    """The transformer of the other benchmark, as a Trainer of transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.batch = small_transformer()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": language_loss(self.model, tokens)}


class Training:
    """One Trainer's training, a batch at a time.

    Args:
        train: ``train(pause, watch)`` trains, within ``watch(trainer)``, and calls ``pause()`` after each batch.
        track_updates: whether updates are tracked; None: nothing is watched.
    """

    def __init__(
        self, train: Callable[[Callable[..., Any], Callable[..., Any]], Any], track_updates: bool | None
    ) -> None:
        self.run: TrainingRun | None = None
        self.watches_forward = False
        self._track_updates = track_updates
        self._loop = SteppedLoop(lambda pause: train(pause, self._watch))
        self._loop.advance()
        if self.run is not None:
            self._detach(self.run)

    def step(self) -> float:
        """Train on one batch; returns the thread's time in seconds."""
        with self._attached():
            start = thread_time()
            self._loop.advance()
            return thread_time() - start

    def close(self) -> None:
        self._loop.close()

    @contextmanager
    def _watch(self, trainer: Any) -> Iterator[None]:
        if self._track_updates is None:
            yield
            return
        watch = watch_lightning if isinstance(trainer, lightning.Trainer) else watch_hf
        with watch(trainer, track_updates=self._track_updates) as self.run:
            yield

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Put the observer's global hooks in for one batch: they must be gone in one that is bare."""
        if self.run is None:
            yield
            return
        recorder = self.run.facts.recorder
        _taps.attach(recorder)
        if self.watches_forward:
            _taps.attach_forward(recorder)
        try:
            yield
        finally:
            self._detach(self.run)

    def _detach(self, run: TrainingRun) -> None:
        recorder = run.facts.recorder
        self.watches_forward = recorder in _taps._forward_watchers
        _taps.detach(recorder)
        _taps.detach_forward(recorder)


def train_lightning(pause: Callable[..., Any], watch: Callable[..., Any], batches: int) -> None:
    seed_everything(0)
    module = LitModel()

    class Pause(lightning.Callback):
        def on_train_batch_end(self, *given: Any) -> None:
            pause()

    trainer = make_lightning_trainer(max_steps=batches, callbacks=[Pause()])
    with watch(trainer):
        trainer.fit(module, DataLoader([module.batch] * batches, batch_size=None))


def train_transformers(pause: Callable[..., Any], watch: Callable[..., Any], batches: int) -> None:
    seed_everything(0)
    model = HFModel()

    class Pause(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **named: Any) -> None:
            pause()

    rows = {"tokens": model.batch.repeat(batches, 1)}
    size = len(model.batch)
    trainer = make_hf_trainer(
        model, rows, max_steps=batches, per_device_train_batch_size=size, callbacks=[Pause()], label_names=[]
    )
    with watch(trainer):
        trainer.train()


FRAMEWORKS = {"Lightning": train_lightning, "transformers": train_transformers}
MODES: dict[str, bool | None] = {"control": None, "no updates": False, "updates": True}


def alternate(framework: str, mode: str, pairs: int) -> Result:
    """Let single batches of two Trainers take turns."""
    train = FRAMEWORKS[framework]
    batches = pairs + WARMUP_STEPS + 3
    trainings = [
        Training(lambda pause, watch: train(pause, watch, batches), track_updates)
        for track_updates in (None, MODES[mode])
    ]
    times = []
    for number in range(-WARMUP_STEPS, pairs):
        taken = [0.0, 0.0]
        # the second of a pair finds warmer caches: they take turns at that too
        for which in (0, 1) if number % 2 else (1, 0):
            taken[which] = trainings[which].step()
        if number >= 0:
            times.append(taken)
    for training in trainings:
        training.close()
    bare, watched = zip(*times, strict=True)
    ratios = [b / a for a, b in times]
    return Result(framework, mode, statistics.median(bare), statistics.median(watched), statistics.median(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=80, help="pairs of batches a row (default: 80)")
    arguments = parser.parse_args()
    if arguments.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {arguments.pairs}")
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice of the frameworks on loaders and workers
        print(table([alternate(framework, mode, arguments.pairs) for framework in FRAMEWORKS for mode in MODES]))


if __name__ == "__main__":
    main()
