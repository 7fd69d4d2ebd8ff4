"""``fit`` that is saved and resumed as Lightning does it, against one that never was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tl_core import TrainingSetup
from tl_lightning._advice import RESUME, advised, explained, in_words, repeated, told_of_hooks
from tl_lightning._extras import needs
from tl_lightning._own_code import running
from tl_lightning._resumed_fits import Fits

if TYPE_CHECKING:
    from tl_resume import ResumeReport


def check_lightning_resume_equivalent(
    make_fit: Callable[[], tuple[Any, ...]],
    *,
    steps: int = 8,
    resume_at: int | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    """Check that ``fit`` that is saved, killed and resumed with ``ckpt_path`` is the one that was never interrupted.

    The Trainer runs as it is, with its own loaders, and is stopped after each batch. It saves where ``ModelCheckpoint``
    does: at the end of a batch, after an epoch's last batch at the end of the epoch. ``tl_resume`` compares the runs,
    and establishes what makes them part.

    Args:
        make_fit: builds all anew: ``(trainer, module)``, and what else ``fit`` is given, the loaders or a data module.
        steps: how many batches the uninterrupted run trains on; at least 2. The Trainer must not end before.
        resume_at: the batch before which is saved. None: half of the steps, moved on to the first after an update.
        seed: seeds python, numpy and torch before ``make_fit`` is called; the resumed run gets the next one.
        rtol: relative tolerance of losses and weights; None is that of ``training_resume`` in ``tl_core.Tolerances``
            (1e-5).
        atol: absolute tolerance; None is that of ``training_resume`` (1e-6).
        allow: ids of rules that are allowed to be broken.

    Returns:
        The report.

    Raises:
        ImportError: tl-resume is not installed.
        TypeError, ValueError: an argument is not what is allowed. Exceptions from the given code pass through.
    """
    needs("tl_resume", "resume")
    from tl_resume import check_resume_equivalent

    fits = Fits(make_fit, steps)

    @running(make_fit)
    def step(setup: TrainingSetup, index: int) -> Any:
        return fits.step(setup, index)

    try:
        report = check_resume_equivalent(
            fits.make_setup,
            lambda index: index,  # the Trainer has its own loader
            step,
            steps=steps,
            resume_at=resume_at,
            save=fits.save,
            load=fits.load,
            device=fits.device(seed),
            seed=seed,
            rtol=rtol,
            atol=atol,
            allow=allow,
        )
    finally:
        fits.close()
    report = told_of_hooks(advised(report, RESUME), fits.restoring)
    report = explained(report, fits.lost, fits.overwritten)
    return in_words(repeated(report, fits.beyond_epoch), {r"\bmake_setup\(\)": "make_fit()"}, fits.callbacks)


def assert_lightning_resume_equivalent(
    make_fit: Callable[[], tuple[Any, ...]],
    *,
    steps: int = 8,
    resume_at: int | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> ResumeReport:
    """Assert that ``fit`` that is saved, killed and resumed with ``ckpt_path`` is the one that was never interrupted.

    The arguments are those of ``check_lightning_resume_equivalent``.

    Example:
        >>> assert_lightning_resume_equivalent(lambda: (make_trainer(), LitClassifier(), make_loader()), resume_at=4)

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: the resumed run is another one, or something was not restored.
        NotJudged: the loop differs so much from itself that nothing can be told.
        ImportError, TypeError, ValueError: as in ``check_lightning_resume_equivalent``.
    """
    return check_lightning_resume_equivalent(
        make_fit, steps=steps, resume_at=resume_at, seed=seed, rtol=rtol, atol=atol, allow=allow
    ).require()
