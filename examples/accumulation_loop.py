"""A training loop with gradient accumulation that makes the updates that the big batch would make.

A small language model is trained on written sums. Only the tokens of the answer count, and answers differ in length,
so that micro-batches differ in how many tokens count: each loss is a sum, divided by the number of tokens of its
whole group. The clip, the schedule and the average of the weights see complete groups only. An epoch has 18 micro-
batches and a group has four: the last group of an epoch has two, and makes an update like the others.

    python accumulation_loop.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tl_core import TrainingSetup, seed_everything
from tl_telemetry import num_updates

NUM_EXAMPLES = 288
MICRO_BATCH_SIZE = 16
ACCUMULATION_STEPS = 4
EPOCHS = 6
EPOCH_LENGTH = math.ceil(NUM_EXAMPLES / MICRO_BATCH_SIZE)  # in micro-batches
MAX_NORM = 1.0
WARMUP_UPDATES = 5
ALPHABET = "0123456789+=; "
LENGTH = len("99+99=198;")
IGNORED = -100

Batch = dict[str, Tensor]  # tokens (N, LENGTH - 1), labels (N, LENGTH - 1), num_tokens (): what counts in the group


class Adder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH - 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.body(self.tokens(tokens) + self.places, mask=mask, is_causal=True))


def make_setup() -> TrainingSetup:
    model = Adder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    # the schedule counts updates, so its length is the number of updates
    total = num_updates(NUM_EXAMPLES, MICRO_BATCH_SIZE, EPOCHS, accumulation_steps=ACCUMULATION_STEPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / WARMUP_UPDATES, 1.0) * (1.0 - update / total)
    )
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return TrainingSetup(model, optimizer, scheduler, state={"ema": ema})


def make_step(accumulation_steps: int) -> Callable[[TrainingSetup, Batch], Tensor]:
    def step(setup: TrainingSetup, batch: Batch) -> Tensor:
        place = setup.step_index % EPOCH_LENGTH
        logits = setup.model(batch["tokens"])
        summed = functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = summed / batch["num_tokens"]
        loss.backward()
        if (place + 1) % accumulation_steps == 0 or place + 1 == EPOCH_LENGTH:
            nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            setup.scheduler.step()
            setup.state["ema"].update_parameters(setup.model)
        return loss.detach()

    return step


def micro_batches(epoch: int) -> Iterator[Batch]:
    """Yield an epoch's micro-batches, as a loader would: made-up sums, of which the question does not count."""
    draw = random.Random(epoch)
    for _ in range(EPOCH_LENGTH):
        pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(MICRO_BATCH_SIZE)]
        texts = [f"{a}+{b}={a + b};".ljust(LENGTH) for a, b in pairs]
        tokens = torch.tensor([[ALPHABET.index(letter) for letter in text] for text in texts])
        labels = tokens[:, 1:].clone()
        for row, text in enumerate(texts):
            labels[row, : text.index("=")] = IGNORED
            labels[row, text.index(";") :] = IGNORED
        yield {"tokens": tokens[:, :-1], "labels": labels}


def groups(epoch: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each update, every one with the number of tokens that count in all of them."""
    epoch_batches = micro_batches(epoch)
    while group := list(islice(epoch_batches, ACCUMULATION_STEPS)):
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in group)
        yield [{**batch, "num_tokens": num_tokens} for batch in group]


def main() -> None:
    seed_everything(0)
    setup, step = make_setup(), make_step(ACCUMULATION_STEPS)
    for epoch in range(EPOCHS):
        total, updates = 0.0, 0
        for group in groups(epoch):
            for batch in group:
                total += step(setup, batch).item()
                setup.step_index += 1
            updates += 1
        print(f"epoch {epoch + 1}: {updates} updates, loss {total / updates:.3f}")


# What the check needs: the full batches of an epoch, one a group.


def full_batches() -> list[Batch]:
    return [
        {name: torch.cat([batch[name] for batch in group]) for name in ("tokens", "labels")}
        | {"num_tokens": group[0]["num_tokens"]}
        for group in groups(0)
    ]


if __name__ == "__main__":
    main()
