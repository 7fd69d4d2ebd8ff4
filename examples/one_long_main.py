"""A training script as one long function, which builds what it trains and has the loop inside.

It knows nothing of checks. Whoever calls ``main`` may pass functions that it calls when training begins and after each
step, as a logger or a progress bar would be called; ``custom_harness.py`` watches it through these.

    python one_long_main.py --steps 200
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn


def main(
    arguments: Sequence[str] | None = None,
    on_begin: Callable[..., Any] = lambda *built: None,
    on_step: Callable[..., Any] = lambda loss: None,
) -> None:
    parser = argparse.ArgumentParser(description="Tell the arms of a spiral apart.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="save here")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 5))
    step = 0
    if options.resume:
        checkpoint = torch.load(options.resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        step = checkpoint["step"]

    on_begin(model, optimizer, scheduler)
    while step < options.steps:
        generator = torch.Generator().manual_seed(step)  # a new batch in each step, the same whenever it is made
        arms = torch.randint(3, (96,), generator=generator)
        radius = torch.rand(96, generator=generator)
        angle = 2.1 * arms + 4 * radius + 0.1 * torch.randn(96, generator=generator)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), arms)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        if options.checkpoint and step % options.save_every == 0:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "step": step}, options.checkpoint)
        on_step(loss.detach())
    print(f"{step} steps, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
