"""A tiny BERT that finds names in made-up sentences, trained by a subclass of the Hugging Face Trainer.

Names are rare, so that they weigh more in the loss. Sentences differ in length, and so micro-batches in how many words
count: the loss is a sum over words, divided by how many words the whole update has, as the Trainer counts them.

    python hf_trainer_loop.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification, EvalPrediction, Trainer, TrainingArguments

PADDING = 0
NUM_NAMES = 6  # words 1 to 6
NUM_WORDS = 40
LENGTH = 12
IGNORED = -100
CLASS_WEIGHTS = (1.0, 4.0)  # of words, of names
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
WARMUP_UPDATES = 5

ARGUMENTS = {
    "num_train_epochs": 2,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": WARMUP_UPDATES,
    "weight_decay": 0.01,
    "save_only_model": False,
}


def make_model() -> BertForTokenClassification:
    config = BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=len(CLASS_WEIGHTS),
    )
    return BertForTokenClassification(config)


class NameTrainer(Trainer):
    """Weighs names more than other words, and has an optimizer that transformers does not offer."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        decayed = self.get_decay_parameter_names(self.model)
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.NAdam(groups, lr=self.args.learning_rate, decoupled_weight_decay=True)
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        weights = torch.tensor(CLASS_WEIGHTS, device=outputs.logits.device)
        summed = nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten(), weights, ignore_index=IGNORED, reduction="sum"
        )
        # evaluation has no update, and gets the mean over the batch
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        loss = summed / count
        return (loss, outputs) if return_outputs else loss


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    found, labels = prediction.predictions.argmax(axis=-1), prediction.label_ids
    return {
        "accuracy": float(np.mean((found == labels)[labels != IGNORED])),
        "recall": float(np.mean(found[labels == 1] == 1)),
    }


def make_data(num_sentences: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, NUM_WORDS, (num_sentences, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (num_sentences, 1), generator=generator)
    within = torch.arange(LENGTH) < lengths
    return {
        "input_ids": words.where(within, PADDING),
        "attention_mask": within.long(),
        "labels": (words <= NUM_NAMES).long().where(within, IGNORED),
    }


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Make a batch, as long as its longest sentence."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    longest = int(batch["attention_mask"].sum(dim=1).max())
    return {name: value[:, :longest] for name, value in batch.items()}


def main() -> None:
    training, validation = (
        [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
        for data in (make_data(512, seed=0), make_data(128, seed=1))
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_train_batch_size=BATCH_SIZE, report_to="none", **ARGUMENTS)
        trainer = NameTrainer(make_model(), arguments, collate, training, validation, compute_metrics=compute_metrics)
        trainer.train()
        print(trainer.evaluate())


if __name__ == "__main__":
    main()
