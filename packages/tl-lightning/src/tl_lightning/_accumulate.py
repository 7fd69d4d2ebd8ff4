"""Accumulation by a real Trainer, against full batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tl_core import TrainingSetup
from tl_lightning._advice import ACCUMULATION, advised, in_words
from tl_lightning._extras import needs
from tl_lightning._fed import FedSetups
from tl_lightning._own_code import running

if TYPE_CHECKING:
    from tl_accum import AccumulationReport


def check_lightning_accumulation_equivalent(
    make_module: Callable[..., Any],
    data: Any,
    *,
    accumulation_steps: int = 4,
    cycles: int = 2,
    epoch_length: int | None = None,
    split: Callable[[Any, int], Any] | None = None,
    disable_dropout: bool = True,
    trainer_kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> AccumulationReport:
    """Check that ``accumulate_grad_batches`` makes the updates that full batches make.

    A real ``Trainer.fit`` with ``accumulate_grad_batches=accumulation_steps`` is fed the micro-batches, another with
    ``accumulate_grad_batches=1`` the full batches; ``tl_accum.check_accumulation_equivalent`` compares the two.

    Args:
        make_module: ``make_module()`` builds the LightningModule anew. One that accumulates by itself, by manual
            optimization, is built by ``make_module(k)``, for ``k`` micro-batches an update (1 for full batches).
        data: full batches: one batch, a list of batches (cycled), an iterable such as a DataLoader, or a function from
            the cycle's number to a batch.
        accumulation_steps: micro-batches in a cycle, at least 2.
        cycles: how many full batches are compared, at least 1.
        epoch_length: micro-batches in an epoch; where it is no multiple of ``accumulation_steps``, the incomplete last
            group is compared too. None: no epoch ends.
        split: ``split(batch, parts)`` returns a list of micro-batches. None: ``tl_accum.split_batch``.
        disable_dropout: switch dropout off in all runs.
        trainer_kwargs: further arguments of ``Trainer``.
        device: where it trains.
        seed: seeds python, numpy and torch.
        rtol: relative tolerance; None is that of ``grad_accumulation`` in ``tl_core.Tolerances`` (1e-4).
        atol: absolute tolerance; None is that of ``grad_accumulation`` (1e-6).
        allow: ids of rules that are allowed to be broken.

    Returns:
        The report.

    Raises:
        ImportError: tl-accum is not installed.
        TypeError, ValueError: an argument is not what is allowed. Exceptions from the given code pass through.
    """
    needs("tl_accum", "accum")
    from tl_accum import check_accumulation_equivalent

    setups = FedSetups(make_module, epoch_length, trainer_kwargs)
    if "accumulate_grad_batches" in (trainer_kwargs or {}):
        raise ValueError(
            "trainer_kwargs must leave out accumulate_grad_batches: the check sets it, to 1 and to accumulation_steps"
        )
    by_itself = _takes_argument(make_module)

    def make_step(k: int) -> Callable[[TrainingSetup, Any], Any]:
        # the setup that is built next trains with it
        setups.accumulate = k
        if by_itself:
            setups.make_module = lambda: make_module(k)
        if epoch_length is not None:
            setups.epoch_length = epoch_length if k > 1 else -(-epoch_length // accumulation_steps)

        @running(make_module)
        def step(setup: TrainingSetup, batch: Any) -> Any:
            trainer = setups.trainer_of(setup)
            if trainer.lightning_module.automatic_optimization:
                trainer.accumulate_grad_batches = k  # a setup that was built for full batches may get one micro-batch
            elif not by_itself:
                raise ValueError(
                    f"{type(trainer.lightning_module).__name__} has manual optimization, for which the Trainer does "
                    "not accumulate: pass make_module(k), which builds a module that accumulates k batches by itself"
                )
            return setups.step(setup, batch)

        return step

    report = check_accumulation_equivalent(
        setups.make_setup,
        data,
        make_step,
        accumulation_steps=accumulation_steps,
        cycles=cycles,
        epoch_length=epoch_length,
        split=split,
        disable_dropout=disable_dropout,
        device=device,
        seed=seed,
        rtol=rtol,
        atol=atol,
        allow=allow,
    )
    if not by_itself:
        report = advised(report, ACCUMULATION)
    number = r"make_module(\1)" if by_itself else r"accumulate_grad_batches=\1"
    given = {r"\bmake_setup\(\)": "make_module()", r"\bmake_step\((\w+)\)": number}
    return in_words(report, given, setups.callbacks)


def assert_lightning_accumulation_equivalent(
    make_module: Callable[..., Any],
    data: Any,
    *,
    accumulation_steps: int = 4,
    cycles: int = 2,
    epoch_length: int | None = None,
    split: Callable[[Any, int], Any] | None = None,
    disable_dropout: bool = True,
    trainer_kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    allow: Iterable[str] = (),
) -> AccumulationReport:
    """Assert that ``accumulate_grad_batches`` makes the updates that full batches make.

    The arguments are those of ``check_lightning_accumulation_equivalent``.

    Example:
        >>> assert_lightning_accumulation_equivalent(lambda: LitClassifier(), batches, accumulation_steps=4)

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: accumulation makes other updates than full batches.
        NotJudged: the two cannot be compared.
        ImportError, TypeError, ValueError: as in ``check_lightning_accumulation_equivalent``.
    """
    return check_lightning_accumulation_equivalent(
        make_module,
        data,
        accumulation_steps=accumulation_steps,
        cycles=cycles,
        epoch_length=epoch_length,
        split=split,
        disable_dropout=disable_dropout,
        trainer_kwargs=trainer_kwargs,
        device=device,
        seed=seed,
        rtol=rtol,
        atol=atol,
        allow=allow,
    ).require()


def _takes_argument(make_module: Callable[..., Any]) -> bool:
    """Tell whether a function has to be given something."""
    try:
        inspect.signature(make_module).bind()
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False
