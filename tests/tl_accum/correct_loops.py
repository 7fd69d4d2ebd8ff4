"""Correct loops of every kind: what assert_accumulation_equivalent is called with."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tl_core import TrainingSetup

Kind = Callable[[], dict[str, Any]]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (16, 6)), generator=torch.Generator().manual_seed(1))


def tokens(rows: int = 16, length: int = 5, size: int = 11) -> Tensor:
    return torch.randint(0, size, (rows, length), generator=torch.Generator().manual_seed(2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def loop(
    loss_fn: Callable[[nn.Module, Any], Tensor] = squared,
    before: Callable[[TrainingSetup], None] = lambda setup: None,
    after: Callable[[TrainingSetup], None] = lambda setup: None,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Callable[[int], Any]:
    """Make the usual loop: what runs before and after an update, and how backward passes begin, is given."""

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Any) -> Tensor:
            loss = loss_fn(setup.model, batch)
            backward(loss / k)
            if (setup.step_index + 1) % k == 0:
                before(setup)
                for optimizer in setup.optimizers.values():
                    optimizer.step()
                after(setup)
                for optimizer in setup.optimizers.values():
                    optimizer.zero_grad()
            return loss.detach()

        return step

    return make_step


def setup_of(make_model: Callable[[], nn.Module], make_optimizer: Callable[[Any], Any]) -> Callable[[], Any]:
    def make_setup() -> Any:
        model = make_model()
        return model, make_optimizer(model.parameters())

    return make_setup


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def usual(
    make_optimizer: Callable[[Any], Any], make_model: Callable[[], nn.Module] = mlp, **more: Any
) -> dict[str, Any]:
    return {"make_setup": setup_of(make_model, make_optimizer), "data": inputs(), "make_step": loop(), **more}


@kind
def two_optimizers() -> dict[str, Any]:
    def make_setup() -> Any:
        model = mlp()
        return TrainingSetup(model, {"first": adam(model[0].parameters()), "last": sgd(model[2].parameters())})

    return {"make_setup": make_setup, "data": inputs(), "make_step": loop()}


@kind
def gan() -> dict[str, Any]:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = nn.Linear(6, 6), mlp()

    def make_setup() -> Any:
        model = Both()
        return TrainingSetup(
            model, {"generator": adam(model.generator.parameters()), "critic": adam(model.critic.parameters())}
        )

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Tensor) -> dict[str, Tensor]:
            model = setup.model
            fake = model.generator(batch)
            critic_loss = F.softplus(-model.critic(batch)).mean() + F.softplus(model.critic(fake.detach())).mean()
            (critic_loss / k).backward()
            model.critic.requires_grad_(False)
            generator_loss = F.softplus(-model.critic(fake)).mean()
            (generator_loss / k).backward()
            model.critic.requires_grad_(True)
            if (setup.step_index + 1) % k == 0:
                for optimizer in setup.optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
            return {"critic": critic_loss.detach(), "generator": generator_loss.detach()}

        return step

    return {"make_setup": make_setup, "data": inputs(), "make_step": make_step}


@kind
def grad_scaler() -> dict[str, Any]:
    def make_setup() -> Any:
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return TrainingSetup(model, adam(model.parameters()), scaler=scaler)

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = squared(setup.model, batch)
            setup.scaler.scale(loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.scaler.unscale_(setup.optimizer)
                nn.utils.clip_grad_norm_(setup.model.parameters(), 0.1)
                setup.scaler.step(setup.optimizer)
                setup.scaler.update()
                setup.optimizer.zero_grad()
            return loss.detach()

        return step

    return {"make_setup": make_setup, "data": inputs(), "make_step": make_step}


@kind
def double_precision() -> dict[str, Any]:
    return usual(adam, lambda: mlp().double(), data=inputs().double(), accumulation_steps=8, cycles=3)


@kind
def complex_parameters() -> dict[str, Any]:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).abs().square().mean()

    model = lambda: nn.Linear(6, 3, dtype=torch.complex64)  # noqa: E731
    return usual(adam, model, data=inputs().to(torch.complex64), make_step=loop(loss_fn))


@kind
def sparse_embeddings() -> dict[str, Any]:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids).mean(1))

    def make_setup() -> Any:
        model = Bag()
        rows = torch.optim.SparseAdam(model.table.parameters(), lr=1e-2)
        return TrainingSetup(model, [rows, adam(model.head.parameters())])

    return {"make_setup": make_setup, "data": tokens(), "make_step": loop()}


class Language(nn.Module):
    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=drop, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@kind
def tied_weights() -> dict[str, Any]:
    return usual(adam, Language, data=tokens(), make_step=loop(next_token))


@kind
def recurrent_with_dropout() -> dict[str, Any]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(11, 6), nn.LSTM(6, 6, 2, dropout=0.3, batch_first=True)
            self.head = nn.Linear(6, 11)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(F.dropout(self.rnn(self.embed(ids))[0], 0.2, self.training))

    return usual(adam, Recurrent, data=tokens(), make_step=loop(next_token))


@kind
def lazy_modules() -> dict[str, Any]:
    return usual(sgd, lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)))


@kind
def frozen_parts() -> dict[str, Any]:
    def make_setup() -> Any:
        model = mlp()
        model[0].requires_grad_(False)
        return model, adam(model.parameters())

    return {"make_setup": make_setup, "data": inputs(), "make_step": loop()}


def checkpointed(*, reentrant: bool) -> dict[str, Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, self.embed(x), use_reentrant=reentrant))

    return usual(adam, Checkpointed)


KINDS["reentrant_checkpointing"] = lambda: checkpointed(reentrant=True)
KINDS["checkpointing"] = lambda: checkpointed(reentrant=False)


@kind
def average_of_weights() -> dict[str, Any]:
    def make_setup() -> Any:
        model = mlp()
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        return TrainingSetup(model, adam(model.parameters()), state={"ema": average})

    step = loop(after=lambda setup: setup.state["ema"].update_parameters(setup.model))
    return {"make_setup": make_setup, "data": inputs(), "make_step": step}


@kind
def schedulers() -> dict[str, Any]:
    def make_setup() -> Any:
        model = mlp()
        optimizer = sgd(model.parameters())
        schedule = torch.optim.lr_scheduler
        warmup = schedule.LinearLR(optimizer, 0.1, total_iters=2)
        return (
            model,
            optimizer,
            schedule.SequentialLR(optimizer, [warmup, schedule.CosineAnnealingLR(optimizer, 5)], milestones=[2]),
        )

    return {
        "make_setup": make_setup,
        "data": inputs(),
        "make_step": loop(after=lambda s: s.scheduler.step()),
        "cycles": 4,
    }


@kind
def groups_and_two_clips() -> dict[str, Any]:
    def make_setup() -> Any:
        model = mlp()
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "weight_decay": 0.0}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    def clip(setup: TrainingSetup) -> None:
        nn.utils.clip_grad_norm_(setup.model[0].parameters(), 0.01)
        nn.utils.clip_grad_value_(setup.model[2].parameters(), 0.001)

    return {"make_setup": make_setup, "data": inputs(), "make_step": loop(before=clip)}


@kind
def dictionary_of_losses() -> dict[str, Any]:
    def make_step(k: int) -> Any:
        step = loop()(k)
        return lambda setup, batch: {"loss": step(setup, batch["x"]), "weight": 0.5}

    return usual(adam, data={"x": inputs(), "name": ["row"] * 16}, make_step=make_step)


@kind
def loader() -> dict[str, Any]:
    return usual(
        adam,
        data=DataLoader(TensorDataset(inputs(32, 6)), batch_size=8, shuffle=True),
        make_step=loop(lambda model, batch: squared(model, batch[0])),
    )


@kind
def function_of_the_cycle() -> dict[str, Any]:
    return usual(adam, data=lambda cycle: inputs() + cycle)


@kind
def two_backward_passes() -> dict[str, Any]:
    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            out = setup.model(batch)
            (out.square().mean() / k).backward(retain_graph=True)
            (out.abs().mean() / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad(set_to_none=False)
            return out.mean().detach()

        return step

    return usual(adam, make_step=make_step)


@kind
def penalty_on_gradients() -> dict[str, Any]:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.requires_grad_()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return usual(adam, make_step=loop(loss_fn))


@kind
def standard_step() -> dict[str, Any]:
    return {"make_setup": setup_of(mlp, adam), "data": inputs(), "loss_fn": squared}


@kind
def compiled_module() -> dict[str, Any]:
    return usual(adam, lambda: torch.compile(nn.Sequential(mlp(), nn.Dropout(0.2)), backend="eager"))


@kind
def spans_of_weights() -> dict[str, Any]:
    return usual(adam, lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 1)))


@kind
def frozen_batch_statistics() -> dict[str, Any]:
    def make_setup() -> Any:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model[1].eval()
        return model, adam(model.parameters())

    return {"make_setup": make_setup, "data": inputs(), "make_step": loop()}


@kind
def teacher_and_student() -> dict[str, Any]:
    def make_setup() -> Any:
        model, teacher = mlp(), mlp()
        return TrainingSetup(
            model, adam(model.parameters()), state={"teacher": deepcopy(teacher).requires_grad_(False)}
        )

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = F.mse_loss(setup.model(batch), setup.state["teacher"](batch))
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.model.zero_grad()
            return loss.detach()

        return step

    return {"make_setup": make_setup, "data": inputs(), "make_step": make_step}
