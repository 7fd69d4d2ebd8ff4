"""The check of tl-coverage alone: which optimizer updates which parameter, asked where the optimizers are built.

It runs no step, so that it can stand at the start of any training script.

    python coverage_alone.py
"""

from __future__ import annotations

import sys

from torch import nn, optim

from tl_coverage import check_optimizer_coverage


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.encoder.requires_grad_(False)  # stands for a pretrained one
        self.words = nn.Embedding(500, 16)
        self.decoder = nn.GRU(16, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 500, bias=False)
        self.head.weight = self.words.weight  # tied: one parameter under two names


def make_optimizers(model: Captioner) -> dict[str, optim.Optimizer]:
    body = [*model.decoder.parameters(), *model.norm.parameters()]
    groups = [
        {"params": [p for p in body if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in body if p.ndim < 2], "weight_decay": 0.0},
    ]
    return {"words": optim.Adam(model.words.parameters(), lr=1e-3), "body": optim.AdamW(groups, lr=3e-4)}


def main() -> int:
    model = Captioner()
    optimizers = make_optimizers(model)
    report = check_optimizer_coverage(model, optimizers, no_decay=["*.bias*", "norm.*", "words.*"])
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
