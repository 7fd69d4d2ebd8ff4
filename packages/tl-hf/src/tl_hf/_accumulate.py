"""The accumulation check, on the Trainer's own ``gradient_accumulation_steps``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import Trainer

from tl_core import TrainingSetup, preserve_rng, seed_everything
from tl_hf._accumulation_advice import advised
from tl_hf._attributes import give_back, show
from tl_hf._extras import needs
from tl_hf._feed import Feed
from tl_hf._fit import Fit
from tl_hf._folder import Folder
from tl_hf._garbage import short_collections
from tl_hf._loaders import iterated_loaders_put_back
from tl_hf._made import Maker, check_make_trainer
from tl_hf._own_code import own_code
from tl_hf._setup import setup_of

if TYPE_CHECKING:
    from tl_accum import AccumulationReport

# The epoch of a loader that is longer than this is fed only when somebody asks for it.
_MAX_IMPLIED_EPOCH = 64


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
    """Check that a Trainer's accumulation over micro-batches makes the updates that full batches make.

    A real ``trainer.train()`` with ``gradient_accumulation_steps=1`` is fed full batches, and one with
    ``gradient_accumulation_steps=accumulation_steps`` their micro-batches. What is compared, update by update, is when
    optimizer and scheduler step, gradients, learning rates, weights and what the person's callbacks keep. Where
    something differs, further trainings establish why.

    Nothing is written to the Trainer's ``output_dir``: while the check trains, that is a temporary folder.

    Args:
        make_trainer: ``make_trainer(k)`` returns a fresh Trainer with ``gradient_accumulation_steps=k``.
        data: full batches, as the Trainer's collator makes them: one batch, a list of batches (cycled), an iterable
            such as a DataLoader, or a function from the cycle's number to a batch. None: those of
            ``make_trainer(1).get_train_dataloader()``, without the last one of an epoch where it is smaller.
        accumulation_steps: micro-batches in a group, at least 2.
        cycles: how many full batches are compared, at least 1.
        epoch_length: micro-batches in an epoch; where it is no multiple of ``accumulation_steps``, the incomplete last
            group of an epoch is compared too. None: where ``data`` is None, the length of
            ``make_trainer(accumulation_steps).get_train_dataloader()``, if it has one (and at most 64 batches); else
            no epoch ends.
        split: ``split(batch, parts)`` returns a list of micro-batches. None: ``tl_accum.split_batch``.
        disable_dropout: switch dropout off in all trainings.
        seed: seeds python, numpy and torch before ``make_trainer`` is called, and before batches are drawn.
        rtol: relative tolerance; None is that of ``grad_accumulation`` in ``tl_core.Tolerances`` (1e-4).
        atol: absolute tolerance; None is that of ``grad_accumulation`` (1e-6).
        allow: ids of rules that are allowed to be broken.

    Returns:
        The report.

    Raises:
        ImportError: tl-accum is not installed.
        TypeError, ValueError: an argument is not what is allowed, a batch cannot be split, or ``make_trainer(k)``
            returns a Trainer for another ``k``. Exceptions from the given code pass through, with a note of where they
            came from.
    """
    needs("tl_accum", "accum")
    from tl_accum import check_accumulation_equivalent

    check_make_trainer(make_trainer, "k")
    maker = Maker(make_trainer)
    trainer = maker.first(1, seed=seed)
    if data is None:
        with preserve_rng():
            seed_everything(seed)  # a loader may draw the seed of its order when it is made
            data = _full_batches(trainer)
            if epoch_length is None:
                epoch_length = _incomplete_epoch(maker, accumulation_steps, seed)
    runs = _Runs(maker, accumulation_steps, cycles, epoch_length)
    make_setup, make_step = runs.functions(trainer)
    # a loader that gives the data is left in the middle of its epoch
    with short_collections(), iterated_loaders_put_back(trainer), closing(runs):
        report = check_accumulation_equivalent(
            make_setup,
            data,
            make_step,
            accumulation_steps=accumulation_steps,
            cycles=cycles,
            epoch_length=_endless(data, accumulation_steps, cycles) if epoch_length is None else epoch_length,
            split=split,
            disable_dropout=disable_dropout,
            device=trainer.args.device,
            seed=seed,
            rtol=rtol,
            atol=atol,
            allow=allow,
        )
    return advised(report, trainer)


def assert_hf_accumulation_equivalent(
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
    """Assert that a Trainer's accumulation over micro-batches makes the updates that full batches make.

    The arguments are those of ``check_hf_accumulation_equivalent``.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tl_hf import make_hf_trainer
        >>> ids = torch.randint(0, 32, (16, 8))
        >>> data = {"input_ids": ids, "labels": ids}
        >>> def make_trainer(k):
        ...     config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                          num_attention_heads=2)
        ...     return make_hf_trainer(LlamaForCausalLM(config), data, gradient_accumulation_steps=k)
        >>> print(assert_hf_accumulation_equivalent(make_trainer, data))
        Gradient accumulation: passed

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: accumulation makes other updates than full batches.
        NotJudged: the two cannot be compared: batch statistics, noise, gradients that are not finite.
        ImportError: tl-accum is not installed.
        TypeError, ValueError: an argument is not what is allowed.
    """
    return check_hf_accumulation_equivalent(
        make_trainer,
        data,
        accumulation_steps=accumulation_steps,
        cycles=cycles,
        epoch_length=epoch_length,
        split=split,
        disable_dropout=disable_dropout,
        seed=seed,
        rtol=rtol,
        atol=atol,
        allow=allow,
    ).require()


def _full_batches(trainer: Trainer) -> Any:
    """Return the loader of the Trainer for full batches, without the smaller last one: it could not always be split."""
    loader = trainer.get_train_dataloader()
    if trainer.args.dataloader_drop_last or (_length(loader) or 0) < 2:
        return loader
    trainer.args.dataloader_drop_last = True
    try:
        return trainer.get_train_dataloader()
    finally:
        trainer.args.dataloader_drop_last = False  # the arguments may be those of other Trainers too


def _incomplete_epoch(maker: Maker, accumulation_steps: Any, seed: int) -> int | None:
    """Return how many micro-batches an epoch has, where its last group is incomplete and it is short enough to feed."""
    if not (isinstance(accumulation_steps, int) and accumulation_steps > 1):  # the check says what is allowed
        return None
    length = _length(maker.first(accumulation_steps, seed=seed).get_train_dataloader())
    return length if length is not None and length % accumulation_steps and length <= _MAX_IMPLIED_EPOCH else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # over an iterable dataset
        return None


def _endless(data: Any, accumulation_steps: Any, cycles: Any) -> int | None:
    """Return a length of an epoch that does not end within what is fed.

    That of a loader of full batches, which None stands for, is not that of an epoch of micro-batches.
    """
    sized = hasattr(data, "__iter__") and not isinstance(data, (list, tuple, Mapping, Tensor))
    if not (sized and isinstance(accumulation_steps, int) and isinstance(cycles, int)):
        return None
    return accumulation_steps * (cycles + 1)


class _Runs:
    """The trainings of one check, of which one runs at a time."""

    def __init__(self, maker: Maker, accumulation_steps: int, cycles: int, epoch_length: int | None) -> None:
        self._maker = maker
        self._accumulation_steps = accumulation_steps
        self._cycles = cycles
        self._epoch_length = epoch_length
        self._next = 1  # the accumulation steps of the step that was made last
        self._fits: WeakKeyDictionary[TrainingSetup, tuple[Fit, Feed]] = WeakKeyDictionary()
        self._running: Fit | None = None
        self._folder = Folder()

    def functions(self, first: Trainer) -> tuple[Any, Any]:
        """Return ``make_setup`` and ``make_step``: plain functions, so that nothing here is captured."""

        def make_setup() -> TrainingSetup:
            return self._begin()

        def make_step(k: int) -> Any:
            self._next = k

            def step(setup: TrainingSetup, batch: Any) -> Tensor:
                return self._step(setup)

            def begin_group(setup: TrainingSetup, batches: list[Any]) -> None:
                fit, feed = self._fits[setup]
                fit.trainer.args.gradient_accumulation_steps = k  # a step for another number may go on with a setup
                feed.give(batches, k)

            step.begin_group = begin_group  # type: ignore[attr-defined]
            step.__wrapped__ = own_code(first)  # type: ignore[attr-defined]
            return step

        return make_setup, make_step

    def close(self) -> None:
        """End the training that runs, and remove what was written."""
        self._end()
        self._folder.remove()

    def _end(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.close()

    def _begin(self) -> TrainingSetup:
        self._end()
        k = self._next
        trainer = self._maker.make(k)
        got = trainer.args.gradient_accumulation_steps
        if got != k:
            raise ValueError(
                f"make_trainer({k}) must return a Trainer with gradient_accumulation_steps={k}, got one with {got}: "
                "hand the number on to TrainingArguments"
            )
        feed = Feed(self._length(k))
        vars(trainer)["get_train_dataloader"] = lambda: feed
        fit = self._running = Fit(trainer, self._folder, micro_batches=True)
        setup = setup_of(trainer)
        show(trainer, setup)
        self._fits[setup] = fit, feed
        return setup

    def _length(self, k: int) -> int:
        """Return how many batches an epoch has: as many updates whether they are full or not."""
        if self._epoch_length is None:
            return k * (self._cycles + 1)  # none ends within what is fed
        return self._epoch_length if k > 1 else -(-self._epoch_length // self._accumulation_steps)

    def _step(self, setup: TrainingSetup) -> Tensor:
        fit, _ = self._fits[setup]
        give_back(setup, fit.trainer)
        loss = fit.advance()
        show(fit.trainer, setup)
        if loss is None:
            raise ValueError(
                f"the training ended after {fit.trainer.state.global_step} updates, before all cycles were fed: raise "
                "max_steps or num_train_epochs of make_trainer(k)'s Trainer"
            )
        return loss
