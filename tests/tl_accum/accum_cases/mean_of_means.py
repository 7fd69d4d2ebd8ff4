"""Means over numbers of elements that differ between micro-batches, averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(16, 5, 6, generator=GENERATOR)
LABELS = torch.randint(0, 7, (16, 5), generator=GENERATOR)
LENGTHS = torch.tensor([5, 5, 4, 5, 3, 2, 4, 3, 1, 2, 2, 1, 1, 1, 1, 2])
COUNTED = torch.arange(5) < LENGTHS[:, None]

MESSAGES = {
    "labels that are ignored": """\
Gradient accumulation: failed, 1 finding

[mean-of-means] cycle 1 of 2: each micro-batch weighs 1/4 in the accumulated gradients, and by its share in the full \
batch's: 19, 12, 6, 5 of 42 (batch['labels'] != -100); norm 0.381 instead of 0.326
  cause: each micro-batch's loss is a mean over its own number of elements that count (tokens, mask), and these means \
are averaged: what is in micro-batches with few of them weighs too much
  fix: sum the loss, and divide it by the total number of elements of the whole group, counted before the first \
micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.173       0.1996       1.154   0.9417
  0.bias     0.07463     0.07345      0.9841  0.8094
  2.weight   0.1993      0.2588       1.299   0.9379
  2.bias     0.1768      0.1816       1.027   0.8167""",
    "a mask": """\
Gradient accumulation: failed, 1 finding

[mean-of-means] cycle 1 of 2: each micro-batch weighs 1/4 in the accumulated gradients, and by its share in the full \
batch's: 19, 12, 6, 5 of 42 (batch['mask'] is True); norm 0.381 instead of 0.326
  cause: each micro-batch's loss is a mean over its own number of elements that count (tokens, mask), and these means \
are averaged: what is in micro-batches with few of them weighs too much
  fix: sum the loss, and divide it by the total number of elements of the whole group, counted before the first \
micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.173       0.1996       1.154   0.9417
  0.bias     0.07463     0.07345      0.9841  0.8094
  2.weight   0.1993      0.2588       1.299   0.9379
  2.bias     0.1768      0.1816       1.027   0.8167""",
    "lists of other lengths": """\
Gradient accumulation: failed, 1 finding

[mean-of-means] cycle 1 of 2: each micro-batch weighs 1/4 in the accumulated gradients, and by its share in the full \
batch's: 19, 12, 6, 5 of 42 (the sum of len(batch['targets'][i]['labels'])); norm 0.381 instead of 0.326
  cause: each micro-batch's loss is a mean over its own number of elements that count (tokens, mask), and these means \
are averaged: what is in micro-batches with few of them weighs too much
  fix: sum the loss, and divide it by the total number of elements of the whole group, counted before the first \
micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.173       0.1996       1.154   0.9417
  0.bias     0.07463     0.07345      0.9841  0.8094
  2.weight   0.1993      0.2588       1.299   0.9379
  2.bias     0.1768      0.1816       1.027   0.8167""",
    "weights of examples": """\
Gradient accumulation: failed, 1 finding

[mean-of-means] cycle 1 of 2: each micro-batch weighs 1/4 in the accumulated gradients, and by its share in the full \
batch's: 1.9, 1.2, 0.6, 0.5 of 4.2 (the sum of batch['weight']); norm 0.417 instead of 0.416, in another direction \
(cosine 0.998)
  cause: each micro-batch's loss is a mean over its own total weight, and these means are averaged: what is in \
micro-batches with a small one weighs too much
  fix: sum the loss, and divide it by the total weight of the whole group, counted before the first micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.09864     0.1012       1.026   0.9813
  0.bias     0.1566      0.1578       1.008   0.9998
  2.weight   0.2166      0.2154       0.9945  0.9986
  2.bias     0.3029      0.3037       1.003   0.9998""",
    "weights of classes": """\
Gradient accumulation: failed, 1 finding

[mean-of-means] cycle 1 of 2: each micro-batch weighs 1/4 in the accumulated gradients, and 0.568, 0.0822, 0.0366, \
0.314 in the full batch's; norm 0.414 instead of 0.716
  cause: each micro-batch's loss is normalised by something of its own (a count of elements, a sum of weights or of \
class weights), and not by the whole group's; no tensor of the batch was found whose counts are these shares
  fix: normalise by the total over the whole group, computed before its first micro-batch

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.1611      0.1273       0.7902  0.7691
  0.bias     0.2884      0.1058       0.3667  0.9149
  2.weight   0.3249      0.2178       0.6702  0.8297
  2.bias     0.546       0.311        0.5697  0.8383""",
    "a root of a mean": """\
Gradient accumulation: failed, 1 finding

[mean-of-means] cycle 1 of 2: each micro-batch weighs 1/4 in the accumulated gradients, and 0.323, 0.11, 0.0992, \
0.352 in the full batch's; norm 0.301 instead of 0.331
  cause: these weights add up to 0.884 and not to 1: the loss is no mean over examples but a function of one (a root, \
a logarithm, a ratio), which differs for each micro-batch
  fix: optimise the mean itself (the squared error instead of its root), or accept micro-batches as the batch size of \
this loss: allow=["mean-of-means"]

What acted in cycle 1 of 2:
  step  micro-batch  acts
  0     1 of 4       backward
  1     2 of 4       backward
  2     3 of 4       backward
  3     4 of 4       backward, optimizer step, zero grad
        full batch   backward, optimizer step, zero grad

Gradients as applied (L2 norms):
  parameter  full batch  accumulated  ratio   cosine
  0.weight   0.2453      0.2248       0.9166  0.9997
  0.bias     0.01589     0.01723      1.084   0.9776
  2.weight   0.2216      0.1987       0.8966  0.9992
  2.bias     0.008997    0.01496      1.663   0.7795""",
}

Step = Callable[[TrainingSetup, Any], Any]


Loss = Callable[[torch.Tensor, Any, int], torch.Tensor]


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _case(loss_of: Loss, batch: Any, **options: Any) -> dict[str, Any]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Any) -> Any:
            loss = loss_of(setup.model(batch["x"]), batch, k)
            loss.backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    return {"make_setup": make_setup, "data": batch, "make_step": make_step} | options


def _ignoring(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / k


def _ignoring_group(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    total = batch["counted"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / total


def _masked(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["mask"]).sum() / batch["mask"].sum() / k


def _masked_group(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["mask"]).sum() / batch["counted"]


def _ragged(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    labels = torch.cat([target["labels"] for target in batch["targets"]])
    return _sum_of_ragged(logits, batch) / len(labels) / k


def _ragged_group(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    return _sum_of_ragged(logits, batch) / batch["counted"]


def _sum_of_ragged(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    labels = [target["labels"] for target in batch["targets"]]
    counted = [one[: len(label)] for one, label in zip(logits, labels, strict=True)]
    return nn.functional.cross_entropy(torch.cat(counted), torch.cat(labels), reduction="sum")


def _weighted(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    errors = logits.square().mean(dim=(1, 2))
    return (errors * batch["weight"]).sum() / batch["weight"].sum() / k


def _weighted_group(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    errors = logits.square().mean(dim=(1, 2))
    return (errors * batch["weight"]).sum() / batch["total"]


CLASS_WEIGHTS = torch.tensor([5.0, 1.0, 1.0, 0.1, 0.1, 3.0, 1.0])


def _by_class(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), weight=CLASS_WEIGHTS) / k


def _by_class_group(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    labels = batch["labels"].flatten()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels, weight=CLASS_WEIGHTS, reduction="sum")
    return loss / batch["total"]


def _root(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    return (logits - 3.0 * batch["x"].sum(2, keepdim=True)).square().mean().sqrt() / k


def _square(logits: torch.Tensor, batch: Any, k: int) -> torch.Tensor:
    return (logits - 3.0 * batch["x"].sum(2, keepdim=True)).square().mean() / k


IGNORED = {"x": X, "labels": LABELS.masked_fill(~COUNTED, -100), "counted": float(COUNTED.sum())}
MASKED = {"x": X, "labels": LABELS, "mask": COUNTED, "counted": float(COUNTED.sum())}
RAGGED = {
    "x": X,
    "targets": [{"labels": labels[:length]} for labels, length in zip(LABELS, LENGTHS, strict=True)],
    "counted": float(COUNTED.sum()),
}
WEIGHTS = {"x": X, "weight": LENGTHS / 10.0, "total": float(LENGTHS.sum()) / 10.0}
SORTED = {"x": X, "labels": LABELS.flatten().sort().values.view(16, 5)}


def buggy() -> dict[str, dict[str, Any]]:
    return {
        "labels that are ignored": _case(_ignoring, IGNORED),
        "a mask": _case(_masked, MASKED),
        "lists of other lengths": _case(_ragged, RAGGED),
        "weights of examples": _case(_weighted, WEIGHTS),
        "weights of classes": _case(_by_class, SORTED),
        "a root of a mean": _case(_root, {"x": X.sort(0).values}),
    }


def healthy() -> dict[str, dict[str, Any]]:
    by_class = SORTED | {"total": float(CLASS_WEIGHTS[SORTED["labels"]].sum())}
    return {
        "labels that are ignored": _case(_ignoring_group, IGNORED),
        "a mask": _case(_masked_group, MASKED),
        "lists of other lengths": _case(_ragged_group, RAGGED),
        "weights of examples": _case(_weighted_group, WEIGHTS),
        "weights of classes": _case(_by_class_group, by_class),
        "a root of a mean": _case(_square, {"x": X.sort(0).values}),
    }


def near_misses() -> dict[str, dict[str, Any]]:
    def make_at_end(k: int) -> Step:
        # sums, and the accumulated gradients are divided by the number of tokens that was counted on the way
        def step(setup: TrainingSetup, batch: Any) -> Any:
            labels = batch["labels"].flatten()
            loss = nn.functional.cross_entropy(setup.model(batch["x"]).flatten(0, 1), labels, reduction="sum")
            loss.backward()
            setup.tokens = getattr(setup, "tokens", 0) + int((labels != -100).sum())
            if (setup.step_index + 1) % k == 0:
                for parameter in setup.model.parameters():
                    parameter.grad /= setup.tokens
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                setup.tokens = 0
            return loss

        return step

    even = IGNORED | {"labels": LABELS.masked_fill(torch.arange(5) > 2, -100)}
    return {
        "as many labels in each micro-batch": _case(_ignoring, even),
        "gradients divided by the tokens of the group": _case(_ignoring, IGNORED) | {"make_step": make_at_end},
        "a mean over each sequence": _case(
            lambda logits, batch, k: (
                ((logits.square().mean(2) * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean() / k
            ),
            MASKED,
        ),
        "padding that counts": _case(
            lambda logits, batch, k: (logits.square().mean(2) * batch["mask"]).mean() / k, MASKED
        ),
    }
