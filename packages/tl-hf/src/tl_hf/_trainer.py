"""A real Trainer, set up for tests: few steps, quiet, no files that stay."""

from __future__ import annotations

import difflib
import inspect
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

# What a test needs otherwise than a training; what decides how is trained is left as transformers has it.
_QUIET = {
    "report_to": "none",
    "disable_tqdm": True,
    "logging_strategy": "no",
    "save_strategy": "no",
    "eval_strategy": "no",
}
_NUM_STEPS = 8
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_OWN_PARAMETERS = ("self", "model", "args", "train_dataset", "eval_dataset")


class TensorDictDataset(Dataset[dict[str, Tensor]]):
    """The rows of named tensors, as dicts.

    Args:
        tensors: tensors of one length, by the names of the model's inputs.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


def make_hf_trainer(
    model: nn.Module | None,
    train_dataset: Any,
    eval_dataset: Any = None,
    *,
    trainer_class: type[Trainer] = Trainer,
    output_dir: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **overrides: Any,
) -> Trainer:
    """Return a Trainer set up for tests: 8 updates, no progress bar, no logs, no checkpoints unless asked for.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2)
        >>> ids = torch.randint(0, 32, (16, 8))
        >>> trainer = make_hf_trainer(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, learning_rate=1e-3)
        >>> trainer.train().global_step
        8

    Args:
        model: the model; None with ``model_init``.
        train_dataset: any dataset that a Trainer takes, or a dict of tensors of one length, by the names of the model's
            inputs (``{"input_ids": ..., "labels": ...}``).
        eval_dataset: the same, or None.
        trainer_class: ``Trainer`` or a class derived from it.
        output_dir: the folder for checkpoints. None: a temporary one, removed with the Trainer.
        device: ``"cpu"``, or the accelerator that a Trainer chooses by itself (``"cuda"``, ``"mps"``, ...). Of several
            GPUs, the first is used.
        seed: ``TrainingArguments.seed``; the Trainer seeds python, numpy and torch with it.
        overrides: further arguments of ``TrainingArguments`` (``learning_rate=``, ``gradient_accumulation_steps=``) or
            of the Trainer's class (``callbacks=``, ``data_collator=``, ``compute_metrics=``). Without ``max_steps`` and
            ``num_train_epochs``, ``max_steps`` is 8; what else is not named is as transformers has it.

    Returns:
        The Trainer.

    Raises:
        TypeError, ValueError: an argument is not what is allowed, or unknown.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        got = trainer_class.__name__ if isinstance(trainer_class, type) else f"a {type(trainer_class).__name__}"
        raise TypeError(f"trainer_class must be Trainer or a class derived from it, got {got}")
    if not isinstance(model, nn.Module) and (model is not None or overrides.get("model_init") is None):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"model must be a torch.nn.Module, or None with model_init=..., got {got}")
    if train_dataset is None:
        raise TypeError("train_dataset must be a dataset or a dict of tensors, got None")
    given = _sorted_out(overrides, trainer_class)
    kind = _device_kind(device)
    folder = tempfile.mkdtemp(prefix="tl-hf-") if output_dir is None else str(output_dir)
    try:
        args = _arguments(given.pop("args"), output_dir=folder, kind=kind, seed=seed)
        trainer = trainer_class(
            model=model,
            args=args,
            train_dataset=_as_dataset(train_dataset, "train_dataset"),
            eval_dataset=_as_eval_dataset(eval_dataset),
            **given,
        )
    except BaseException:
        if output_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if output_dir is None:
        weakref.finalize(trainer, shutil.rmtree, folder, ignore_errors=True)
    if args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)  # it stands for the progress bar, and prints every log
    return trainer


def _arguments(overrides: dict[str, Any], *, output_dir: str, kind: str, seed: int) -> TrainingArguments:
    given: dict[str, Any] = {**_QUIET, "dataloader_pin_memory": kind != "cpu", **overrides}
    if not {"max_steps", "num_train_epochs"} & set(overrides):
        given["max_steps"] = _NUM_STEPS
    args = TrainingArguments(output_dir=output_dir, use_cpu=kind == "cpu", seed=seed, **given)
    if args.n_gpu > 1:
        args._n_gpu = 1  # DataParallel over all GPUs is what a Trainer makes of them by itself
    return args


def _sorted_out(overrides: dict[str, Any], trainer_class: type[Trainer]) -> dict[str, Any]:
    """Tell the arguments of the Trainer's class, by name, from those of ``TrainingArguments``, under ``args``."""
    known = {field.name for field in fields(TrainingArguments) if field.init}
    own = {
        name
        for base in trainer_class.__mro__
        if "__init__" in vars(base) and base is not object
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if parameter.kind not in _VARIADIC and name not in _OWN_PARAMETERS
    }
    takes_any = trainer_class is not Trainer and _takes_any_keyword(trainer_class)
    sorted_out: dict[str, Any] = {"args": {}}
    for name, value in overrides.items():
        if name == "args":
            raise TypeError("args is made here: pass the arguments of TrainingArguments themselves (learning_rate=...)")
        if name == "use_cpu":
            raise TypeError('use_cpu follows from device: pass device="cpu", or the name of an accelerator')
        if name in known and name not in own:
            sorted_out["args"][name] = value
        elif name in own or takes_any:
            sorted_out[name] = value
        else:
            raise TypeError(_unknown(name, known | own, trainer_class))
    return sorted_out


def _takes_any_keyword(trainer_class: type[Trainer]) -> bool:
    """Tell whether the class takes keywords whose names its signatures do not show: ``kwargs.pop("alpha")``."""
    signature = inspect.signature(trainer_class.__init__)
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _unknown(name: str, known: set[str], trainer_class: type[Trainer]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{name} is no argument of TrainingArguments, nor of {trainer_class.__name__}{hint}"


def _device_kind(device: str | torch.device) -> str:
    """Return the kind of a device that a Trainer can be made to use."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a device of torch, such as 'cpu' or 'cuda', got {device!r}") from None
    if wanted.type == "cpu":
        return "cpu"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != wanted.type:
        here = "'cpu'" if found is None else f"'cpu' or {found.type!r}"
        raise ValueError(f"device {str(wanted)!r} is not available here: a Trainer can use {here}")
    if wanted.index not in (None, 0):
        raise ValueError(
            f"device must be 'cpu' or {wanted.type!r}, got {str(wanted)!r}: a Trainer uses the first {wanted.type} "
            "device that the process sees (CUDA_VISIBLE_DEVICES chooses which one that is)"
        )
    return wanted.type


def _is_tensor_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(entry, Tensor) for entry in value.values())


def _as_dataset(given: Any, name: str) -> Any:
    """Return a dataset as it is, and the rows of a dict of tensors."""
    if not isinstance(given, Mapping):
        return given
    if not _is_tensor_dict(given):
        kinds = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in given.items()) or "nothing"
        raise TypeError(f"{name} must be a dataset or a dict of tensors, got a {type(given).__name__} of {kinds}")
    shapes = {key: tuple(tensor.shape) for key, tensor in given.items()}
    if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        listed = ", ".join(f"{key!r}: {shape}" for key, shape in shapes.items())
        raise ValueError(f"the tensors of {name} must have one row an example, got shapes {listed}")
    return TensorDictDataset(given)


def _as_eval_dataset(given: Any) -> Any:
    """Return evaluation data; a Trainer also takes a dict of named datasets."""
    if isinstance(given, Mapping) and given and not any(isinstance(value, Tensor) for value in given.values()):
        return {name: _as_dataset(value, f"eval_dataset[{name!r}]") for name, value in given.items()}
    return _as_dataset(given, "eval_dataset")
