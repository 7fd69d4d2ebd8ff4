"""What the tests of this folder share: tiny models, built from configs, and data for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

pytest.importorskip("transformers.trainer")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging

from tl_hf import make_hf_trainer

_SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(dropout: float = 0.0) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_SMALL, intermediate_size=32, attention_dropout=dropout))


def gpt2() -> nn.Module:
    special = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, **special))


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**_SMALL, intermediate_size=32))


def tokens(num_examples: int = 40) -> dict[str, Tensor]:
    """Sequences of 8 tokens, with labels for the first 1 to 8 of them: unequal numbers of tokens that count."""
    ids = torch.randint(1, 32, (num_examples, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(num_examples):
        labels[row, 1 + row * 5 % 8 :] = -100
    return {"input_ids": ids, "labels": labels}


def classes(num_examples: int = 40) -> dict[str, Tensor]:
    ids = torch.randint(1, 32, (num_examples, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": torch.arange(num_examples) % 2}


def rows(data: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: tensor[start:stop] for name, tensor in data.items()}


def trainer_for(model: nn.Module | None = None, data: Any = None, **arguments: Any) -> Any:
    """A Trainer of a tiny Llama on tokens, in batches of 4, with a rate at which something happens."""
    given = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, **arguments}
    if model is None and "model_init" not in given:
        model = llama()
    return make_hf_trainer(model, tokens() if data is None else data, **given)


@pytest.fixture(scope="session")
def hf() -> SimpleNamespace:
    """Tiny models, data and Trainers."""
    return SimpleNamespace(
        llama=llama, gpt2=gpt2, bert=bert, tokens=tokens, classes=classes, rows=rows, trainer=trainer_for
    )


def moving_parts() -> dict[str, Any]:
    """Return everything global that a check touches."""
    hooks = {
        "optimizer pre": torch_optimizer._global_optimizer_pre_hooks,
        "optimizer post": torch_optimizer._global_optimizer_post_hooks,
        "forward pre": nn_module._global_forward_pre_hooks,
        "forward": nn_module._global_forward_hooks,
    }
    return {
        **{name: tuple(hook.values()) for name, hook in hooks.items()},
        "engine": torch.autograd._engine_run_backward,
        "grad mode": torch.is_grad_enabled(),
        "progress bars": logging.is_progress_bar_enabled(),
        "frozen": gc.get_freeze_count(),
        "verbosity": logging.get_verbosity(),
    }


@pytest.fixture(autouse=True)
def everything_is_put_back() -> Iterator[None]:
    """Fail any test that leaves something behind: a hook, a switched-off bar, a frozen heap."""
    before, state = moving_parts(), torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    after = moving_parts()
    assert {name: (value, after[name]) for name, value in before.items() if value != after[name]} == {}
