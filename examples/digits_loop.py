"""A training loop as people write them: a classifier on scikit-learn's bundled digits, on top of a frozen stem.

Decay and no-decay parameter groups, a linear warmup, accumulation where memory is short, clipping, an average of the
weights, evaluation, and checkpoints. What the checks need of it is at the end: they are handed the loop's own
``make_setup``, ``train_step``, ``save`` and ``load``, and are told what this loop promises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tl_accum import AccumulationReport, assert_accumulation_equivalent
from tl_core import TrainingSetup
from tl_coverage import assert_optimizer_coverage
from tl_resume import ResumeReport, assert_resume_equivalent
from tl_telemetry import TrainingRun, run_training

BATCH_SIZE = 64
LEARNING_RATE = 3e-3
WARMUP_STEPS = 10
MAX_NORM = 2.0
EVALUATE_EVERY = 22  # the batches of one epoch

Batch = tuple[Tensor, Tensor, Tensor]  # images (N, 1, 8, 8), digits (N,), ink (N,): the image's mean


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # stands for a pretrained backbone: neither its weights nor its statistics are to change
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).requires_grad_(False)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16 * 64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1))
        self.digit = nn.Linear(64, 10)
        self.ink = nn.Linear(64, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(self.stem(images))
        return self.digit(features), self.ink(features)

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        self.stem.eval()
        return self


@functools.cache
def load_data() -> tuple[list[Batch], Batch]:
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    data = (images, torch.tensor(digits.target), images.mean(dim=(1, 2, 3)))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    training, validation = order[: EVALUATE_EVERY * BATCH_SIZE], order[EVALUATE_EVERY * BATCH_SIZE :]
    batches = [tuple(part[rows] for part in data) for rows in training.split(BATCH_SIZE)]
    return batches, tuple(part[validation] for part in data)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def warmup(update: int) -> float:
    return min(1.0, (update + 1) / WARMUP_STEPS)


def make_setup() -> TrainingSetup:
    model = Classifier().train()
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    setup = TrainingSetup(model, optimizer, scheduler, state={"ema": ema})
    setup.losses, setup.accuracies = [], []
    return setup


def train_step(setup: TrainingSetup, batch: Batch, accumulation_steps: int = 1) -> dict[str, Tensor]:
    images, digits, ink = batch
    logits, ink_seen = setup.model(images)
    digit_loss = functional.cross_entropy(logits, digits)
    ink_loss = functional.mse_loss(ink_seen.squeeze(1), ink)
    loss = digit_loss + ink_loss
    (loss / accumulation_steps).backward()
    if (setup.step_index + 1) % accumulation_steps == 0:
        update(setup)
    setup.losses.append(loss.detach())
    if (setup.step_index + 1) % EVALUATE_EVERY == 0:
        setup.accuracies.append(evaluate(setup.model))
    return {"loss": loss, "digit": digit_loss, "ink": ink_loss}


def update(setup: TrainingSetup) -> None:
    nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)
    setup.optimizer.step()
    setup.scheduler.step()
    setup.optimizer.zero_grad()
    setup.state["ema"].update_parameters(setup.model)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    images, digits, _ = load_data()[1]
    model.eval()
    logits, _ = model(images)
    model.train()
    return (logits.argmax(dim=1) == digits).float().mean().item()


def save(setup: TrainingSetup, path: Path) -> None:
    checkpoint = {
        "model": setup.model.state_dict(),
        "optimizer": setup.optimizer.state_dict(),
        "scheduler": setup.scheduler.state_dict(),
        "ema": setup.state["ema"].state_dict(),
        "generator": torch.get_rng_state(),  # dropout draws from it
        "history": (setup.losses, setup.accuracies),
        "step": setup.step_index,
    }
    torch.save(checkpoint, path)


def load(setup: TrainingSetup, path: Path) -> int:
    """Restore a checkpoint and return the step to go on from."""
    checkpoint = torch.load(path, weights_only=True)
    setup.model.load_state_dict(checkpoint["model"])
    setup.optimizer.load_state_dict(checkpoint["optimizer"])
    setup.scheduler.load_state_dict(checkpoint["scheduler"])
    setup.state["ema"].load_state_dict(checkpoint["ema"])
    torch.set_rng_state(checkpoint["generator"])
    setup.losses, setup.accuracies = checkpoint["history"]
    return checkpoint["step"]


# What the checks need. `run` is run_training, or a test's training_runner.run; the others likewise.


def train(run: Callable[..., TrainingRun] = run_training, *, steps: int = 2 * EVALUATE_EVERY) -> TrainingRun:
    return run(make_setup, load_data()[0], train_step, steps=steps)


def check(run: TrainingRun) -> None:
    assert_optimizer_coverage(run.setup.model, run.setup.optimizers, no_decay=["*.bias", "body.2.*"])
    run.assert_healthy(max_grad_norm=30.0)
    run.assert_lr(lambda step: LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS))
    run.assert_loss_decreases(0.3)


def make_step(accumulation_steps: int) -> Callable[..., dict[str, Tensor]]:
    return functools.partial(train_step, accumulation_steps=accumulation_steps)


def check_accumulation(
    assert_equivalent: Callable[..., AccumulationReport] = assert_accumulation_equivalent,
) -> AccumulationReport:
    return assert_equivalent(make_setup, load_data()[0], make_step, accumulation_steps=2)


def check_resume(assert_equivalent: Callable[..., ResumeReport] = assert_resume_equivalent) -> ResumeReport:
    return assert_equivalent(make_setup, load_data()[0], train_step, save=save, load=load, restores_step=True)
