"""The resume check, on ``trainer.train(resume_from_checkpoint=...)`` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import Trainer

from tl_core import TrainingSetup
from tl_hf._attributes import has_own_attributes, pull, push
from tl_hf._batches import RepeatedBatches
from tl_hf._exported import Exported, with_exported
from tl_hf._extras import needs
from tl_hf._fit import Fit
from tl_hf._folder import Folder
from tl_hf._garbage import short_collections
from tl_hf._made import Maker, check_make_trainer
from tl_hf._own_code import own_code
from tl_hf._quiet import without_progress_bars
from tl_hf._resume_advice import advised, undecided
from tl_hf._setup import empty_setup, fill

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
    """Check that a training that is saved, killed and resumed is the training that was never interrupted.

    ``trainer.train()`` runs for real: without interruption; once more, with a checkpoint in the middle, written as the
    Trainer writes it; and resumed from that by ``trainer.train(resume_from_checkpoint=...)`` of a fresh Trainer. Losses
    and weights are compared update by update, and the whole state: model, optimizer, scheduler, GradScaler, what the
    person's own callbacks and their own Trainer class keep. Where the trainings part, further ones establish why.

    Nothing is written to the Trainer's ``output_dir``: while the check trains, that is a temporary folder.

    Args:
        make_trainer: ``make_trainer()`` returns a fresh Trainer, built as a new process would build it.
        steps: how many updates the uninterrupted training makes; at most as many as the Trainer's ``max_steps``.
        resume_at: the update before which is saved, from 1 to ``steps - 1``. None: half of the steps.
        seed: seeds python, numpy and torch before ``make_trainer`` is called; for the resumed Trainer, the next number.
            A Trainer seeds with its ``args.seed`` besides, as it does in a new process.
        rtol: relative tolerance of losses and weights; None is that of ``training_resume`` in ``tl_core.Tolerances``
            (1e-5).
        atol: absolute tolerance; None is that of ``training_resume`` (1e-6).
        allow: ids of rules that are allowed to be broken.

    Returns:
        The report.

    Raises:
        ImportError: tl-resume is not installed.
        TypeError, ValueError: an argument is not what is allowed. Exceptions from the given code pass through, with a
            note of the update they came from.
    """
    needs("tl_resume", "resume")
    from tl_resume import check_resume_equivalent

    check_make_trainer(make_trainer)
    allow = allow if isinstance(allow, str) else tuple(allow)
    maker = Maker(make_trainer)
    trainer = maker.first(seed=seed)

    def check(batches: RepeatedBatches | None = None) -> ResumeReport:
        runs = _Runs(maker, steps, batches)
        make_setup, step, save, load = runs.functions(trainer)
        try:
            report = check_resume_equivalent(
                make_setup,
                lambda index: index,
                step,
                steps=steps,
                resume_at=resume_at,
                save=save,
                load=load,
                device=trainer.args.device,
                seed=seed,
                rtol=rtol,
                atol=atol,
                allow=allow,
            )
        finally:
            runs.close()
        return with_exported(report, runs.exported, trainer, allow)

    with without_progress_bars(), short_collections():
        report = check()
        if undecided(report) and not trainer.args.save_only_model:
            batches = RepeatedBatches()
            return advised(report, trainer, batches if check(batches).ok else None)
    return advised(report, trainer, None)


def assert_hf_resume_equivalent(
    make_trainer: Callable[[], Trainer],
    *,
    steps: int = 8,
    resume_at: int | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    """Assert that a training that is saved, killed and resumed is the training that was never interrupted.

    The arguments are those of ``check_hf_resume_equivalent``.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tl_hf import make_hf_trainer
        >>> ids = torch.randint(0, 32, (40, 8))
        >>> def make_trainer():
        ...     config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                          num_attention_heads=2, attention_dropout=0.1)
        ...     return make_hf_trainer(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})
        >>> print(assert_hf_resume_equivalent(make_trainer))
        Resume equivalence: passed

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: the resumed training is another one, or something was not restored.
        NotJudged: the training differs so much from itself that nothing can be told.
        ImportError: tl-resume is not installed.
        TypeError, ValueError: an argument is not what is allowed.
    """
    return check_hf_resume_equivalent(
        make_trainer, steps=steps, resume_at=resume_at, seed=seed, rtol=rtol, atol=atol, allow=allow
    ).require()


class _Runs:
    """The trainings of one check, of which one runs at a time."""

    def __init__(self, maker: Maker, steps: int, batches: RepeatedBatches | None) -> None:
        self._maker = maker
        self._steps = steps
        self._batches = batches
        self._fits: WeakKeyDictionary[TrainingSetup, Fit] = WeakKeyDictionary()
        self._running: Fit | None = None
        self._folder = Folder()
        self.exported = Exported()
        self._checkpoint = ""  # the name of the one that was written last

    def functions(self, first: Trainer) -> tuple[Any, Any, Any, Any]:
        """Return ``make_setup``, ``step``, ``save`` and ``load``: plain functions, so that nothing here is captured."""

        def make_setup() -> TrainingSetup:
            return self._begin(empty_setup(first))

        def step(setup: TrainingSetup, index: int) -> Tensor:
            return self._step(setup, index)

        def save(setup: TrainingSetup, path: Path) -> None:
            self._write(self._fits[setup], path)

        def load(setup: TrainingSetup, path: Path) -> None:
            self._begin(setup, path)

        step.__wrapped__ = own_code(first)  # type: ignore[attr-defined]
        return make_setup, step, save, load

    def close(self) -> None:
        """End the training that runs, and remove what was written."""
        self._end()
        self._folder.remove()

    def _end(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.close()

    def _begin(self, setup: TrainingSetup, written: Path | None = None) -> TrainingSetup:
        """Begin a training in place of the one that runs, and put what it trains into the setup."""
        self._end()
        trainer = self._maker.make()
        if self._batches is not None:
            self._batches.feed(trainer)
        resume = None if written is None else (written, self._checkpoint)
        fit = self._running = Fit(trainer, self._folder, resume=resume)
        if fit.over or trainer.state.max_steps < self._steps:
            raise ValueError(
                f"steps must be at most the number of updates that make_trainer()'s Trainer makes, "
                f"{trainer.state.max_steps}, got {self._steps}: raise max_steps or num_train_epochs"
            )
        fill(setup, trainer)
        if written is not None:
            self.exported.loaded(trainer)
        if has_own_attributes(trainer):
            setup.trainer = {}  # type: ignore[attr-defined]
            pull(trainer, setup.trainer)  # type: ignore[attr-defined]
        self._fits[setup] = fit
        return setup

    def _step(self, setup: TrainingSetup, index: int) -> Tensor:
        fit = self._fits[setup]
        attributes = getattr(setup, "trainer", None)
        if attributes is not None:
            push(fit.trainer, attributes)
        loss = fit.advance()
        if loss is None:
            raise ValueError(
                f"steps must be at most the number of updates that the training makes, got {self._steps}: it ended "
                f"after {fit.trainer.state.global_step}, where a callback stopped it"
            )
        if attributes is not None:
            pull(fit.trainer, attributes)
        return loss

    def _write(self, fit: Fit, path: Path) -> None:
        """Have the Trainer write a checkpoint, and keep all that lies in its folder then at a path."""
        self._checkpoint = fit.save()
        self.exported.saved(fit.trainer)
        if not (self._folder.path / self._checkpoint).is_dir():
            raise ValueError(
                f"make_trainer()'s Trainer must write its checkpoints as transformers does: there is no folder "
                f"{self._checkpoint} in args.output_dir, with {type(fit.trainer).__name__}._save_checkpoint()"
            )
        self._folder.snapshot(path)
