"""A LightningModule on scikit-learn's bundled digits, with a warmup, dropout, and a callback that averages the weights.

It resumes exactly, within an epoch too, which takes three things that Lightning does not do by itself: an order of the
data that follows from the epoch's number, a loader that knows its place, and random numbers that follow from the number
of the batch.

    python lightning_loop.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

BATCH_SIZE = 128
LEARNING_RATE = 5e-3
WARMUP_UPDATES = 5
MAX_NORM = 1.5
NUM_TRAINING = 1408  # 11 batches

Batch = tuple[Tensor, Tensor]  # images (N, 64), digits (N,)


class LitDigits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        return self.head(features)

    def on_train_batch_start(self, batch: Batch, batch_index: int) -> None:
        torch.manual_seed(100_000 * self.current_epoch + batch_index)  # a checkpoint holds no generator

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        images, digits = batch
        loss = functional.cross_entropy(self(images), digits)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        images, digits = batch
        self.log("accuracy", (self(images).argmax(dim=1) == digits).float().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        trained = list(self.parameters())
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.05},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warmup(update: int) -> float:
    return min(1.0, (update + 1) / WARMUP_UPDATES)


class WeightAverage(pl.Callback):
    """Averages the weights over the updates, and goes on with the average of the checkpoint."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.updates = 0
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: LitDigits, *rest: Any) -> None:
        if trainer.global_step == self.updates:
            return  # a micro-batch of a group that has made no update yet
        self.updates = trainer.global_step
        for name, parameter in module.named_parameters():
            average = self.average.setdefault(name, parameter.detach().clone())
            average.lerp_(parameter.detach(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.average = state["updates"], state["average"]


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = sklearn.datasets.load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16.0, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = order[:NUM_TRAINING], order[NUM_TRAINING:]
    training, validation = (TensorDataset(images[rows], labels[rows]) for rows in parts)
    return training, validation


class EpochOrder(Sampler[int]):
    """Shuffles by the number of the epoch, and can go on in the middle of it.

    Of a checkpoint from within an epoch, Lightning gives the loader its state back; of one from between two epochs, it
    only tells the sampler the epoch, and only after the iterator was made.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.place = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # a generator: this runs when the first index is asked for, and Lightning has told the epoch by then
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        start = self.place % self.length
        for self.place, index in enumerate(order[start:], start + 1):
            yield index

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.place = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


def training_loader() -> StatefulDataLoader:
    dataset, _ = load_data()
    sampler = EpochOrder(len(dataset))
    return StatefulDataLoader(dataset, BATCH_SIZE, sampler=sampler)


def validation_loader() -> DataLoader[Any]:
    return DataLoader(load_data()[1], BATCH_SIZE)


def trainer_arguments() -> dict[str, Any]:
    """Return what this project hands to its Trainer."""
    return {"max_epochs": 4, "gradient_clip_val": MAX_NORM, "callbacks": [WeightAverage()]}


def main() -> None:
    pl.seed_everything(0)
    trainer = pl.Trainer(**trainer_arguments(), logger=False)
    trainer.fit(LitDigits(), training_loader(), validation_loader())


if __name__ == "__main__":
    main()
