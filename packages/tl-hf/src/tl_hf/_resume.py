"""The resume check, on ``trainer.train(resume_from_checkpoint=...)`` itself."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import Trainer

from tl_core import TrainingSetup, preserve_rng, seed_everything
from tl_hf._fit import Fit
from tl_hf._made import made_by
from tl_hf._setup import fill, setup_of

if TYPE_CHECKING:
    from tl_resume import ResumeReport


def check_hf_resume_equivalent(
    make_trainer: Callable[[], Trainer],
    *,
    steps: int = 8,
    resume_at: int | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    from tl_resume import check_resume_equivalent

    fits: WeakKeyDictionary[TrainingSetup, Fit] = WeakKeyDictionary()
    running: list[Fit] = []

    def begin(trainer: Trainer, checkpoint: str | None = None) -> Fit:
        while running:
            running.pop().close()
        running.append(Fit(trainer, checkpoint=checkpoint))
        return running[0]

    def make_setup() -> TrainingSetup:
        fit = begin(made_by(make_trainer))
        setup = setup_of(fit.trainer)
        fits[setup] = fit
        return setup

    def step(setup: TrainingSetup, index: int) -> Any:
        fit = fits[setup]
        loss = fit.advance()
        if fit.over:
            raise ValueError("over")
        return loss

    def save(setup: TrainingSetup, path: Path) -> None:
        trainer = fits[setup].trainer
        fits[setup].save()
        folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        shutil.move(folder, path)

    def load(setup: TrainingSetup, path: Path) -> None:
        fit = begin(made_by(make_trainer), str(path))
        fill(setup, fit.trainer)
        fits[setup] = fit

    try:
        return check_resume_equivalent(make_setup, lambda index: index, step, steps=steps, resume_at=resume_at, save=save, load=load, device="cpu", seed=seed, rtol=rtol, atol=atol, allow=allow)
    finally:
        while running:
            running.pop().close()
