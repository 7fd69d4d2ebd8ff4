"""The check of tl-telemetry alone: a loop of one's own is watched, and judged afterwards.

An autoencoder learns to give back made-up curves. The loop is a plain function that knows nothing of checks; ``main``
puts ``observe`` around it, prints what happened, and demands what only the author can know.

    python telemetry_alone.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tl_core import TrainingSetup
from tl_telemetry import observe

STEPS = 60
WARMUP_UPDATES = 10
LEARNING_RATE = 1e-2


def curves() -> Iterator[Tensor]:
    """Yield batches (64, 32) of waves of any height and phase."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        height, phase = torch.rand(2, 64, 1, generator=generator)
        yield (0.5 + height) * torch.sin(6.28 * (torch.arange(32) / 16 + phase))


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    for batch in curves():
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def main() -> int:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4), nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / WARMUP_UPDATES))
    with observe(TrainingSetup(model, optimizer, scheduler)) as run:
        fit(model, optimizer, scheduler)
    print(run.table())
    print(run.report)
    try:
        run.assert_healthy(max_grad_norm=2.0).assert_num_updates(STEPS)
        run.assert_lr(lambda step: LEARNING_RATE * min(1.0, (step + 1) / WARMUP_UPDATES))
    except AssertionError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
