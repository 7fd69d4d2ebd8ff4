"""Kinds of training loops, each a function that builds a setup and its step."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tl_core import TrainingSetup

STEPS = 5
LOOPS = {}


def loop(build):
    """Register a loop: ``build()`` returns a setup and ``step(setup)``, which trains once and returns the loss."""
    LOOPS[build.__name__] = build
    return build


def mlp(dtype=torch.float32, middle=()):
    return nn.Sequential(nn.Linear(6, 8, dtype=dtype), nn.Tanh(), *middle, nn.Linear(8, 3, dtype=dtype))


def examples(dtype=torch.float32):
    return torch.randn(4, 6).to(dtype), torch.randn(4, 3).to(dtype)


def plain_step(setup):
    x, y = examples(next(setup.model.parameters()).dtype)
    setup.optimizer.zero_grad()
    loss = nn.functional.mse_loss(setup.model(x), y)
    loss.backward()
    setup.optimizer.step()
    return loss


def plain(kind, dtype=torch.float32, **options):
    def build():
        model = mlp(dtype)
        return TrainingSetup(model, kind(model.parameters(), **options)), plain_step

    return build


LOOPS |= {
    "sgd": plain(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam for each": plain(torch.optim.Adam, lr=0.01, foreach=True),
    "adam one by one": plain(torch.optim.Adam, lr=0.01, foreach=False),
    "adam fused": plain(torch.optim.Adam, lr=0.01, fused=True),
    "tensor learning rate": plain(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "float64": plain(torch.optim.Adam, dtype=torch.float64, lr=0.01),
    "bfloat16": plain(torch.optim.SGD, dtype=torch.bfloat16, lr=0.1),
    "rprop": plain(torch.optim.Rprop, lr=0.01),
}


@loop
def lbfgs():
    model = mlp()
    x, y = examples()

    def step(setup):
        def closure():
            setup.optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return setup.optimizer.step(closure)

    return TrainingSetup(model, torch.optim.LBFGS(model.parameters(), max_iter=3)), step


class SAM(torch.optim.Optimizer):
    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def climb(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=group["rho"])

    @torch.no_grad()
    def descend(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()


@loop
def sam():
    model = mlp()

    def step(setup):
        x, y = examples()
        for half in (setup.optimizer.climb, setup.optimizer.descend):
            setup.optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            half()
        return loss

    return TrainingSetup(model, SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)), step


@loop
def optimizers_at_different_rates():
    model = nn.ModuleDict({"often": nn.Linear(6, 6), "seldom": nn.Linear(6, 3)})
    optimizers = {
        "often": torch.optim.Adam(model["often"].parameters(), lr=0.01),
        "seldom": torch.optim.SGD(model["seldom"].parameters(), lr=0.1),
    }
    calls = []

    def step(setup):
        x, y = examples()
        loss = nn.functional.mse_loss(model["seldom"](model["often"](x).relu()), y)
        loss.backward()
        calls.append(None)
        for name, every in (("often", 1), ("seldom", 2)):
            if len(calls) % every == 0:
                setup.optimizers[name].step()
                setup.optimizers[name].zero_grad()
        return loss

    return TrainingSetup(model, optimizers), step


@loop
def optimizer_replaced():
    model = mlp()
    calls = []

    def step(setup):
        calls.append(None)
        if len(calls) == 3:
            setup.optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        return plain_step(setup)

    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), step


@loop
def bound_methods():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_grad, update, clip = optimizer.zero_grad, optimizer.step, nn.utils.clip_grad_norm_

    def step(setup):
        x, y = examples()
        zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        backward = loss.backward
        backward()
        clip(model.parameters(), 0.5)
        update()
        return loss

    return TrainingSetup(model, optimizer), step


@loop
def optimizer_in_backward():
    model = mlp()
    optimizers = {name: torch.optim.SGD([p], lr=0.1, momentum=0.9) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():

        def update(p, name=name):
            optimizers[name].step()
            optimizers[name].zero_grad()

        p.register_post_accumulate_grad_hook(update)

    def step(setup):
        x, y = examples()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    return TrainingSetup(model, optimizers), step


@loop
def sparse_embedding():
    model = nn.EmbeddingBag(10, 3, sparse=True, mode="sum")

    def step(setup):
        setup.optimizer.zero_grad()
        loss = model(torch.randint(10, (4, 5))).pow(2).mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return TrainingSetup(model, torch.optim.SparseAdam(model.parameters(), lr=0.05)), step


@loop
def complex_parameters():
    model = nn.Linear(6, 3, dtype=torch.complex64)

    def step(setup):
        setup.optimizer.zero_grad()
        loss = model(torch.randn(4, 6, dtype=torch.complex64)).abs().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        setup.optimizer.step()
        return loss

    return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.05)), step


@loop
def lazy_modules():
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), plain_step


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.body, self.reentrant = (
            nn.Linear(6, 8),
            nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.3)),
            reentrant,
        )

    def forward(self, x):
        return checkpoint(self.body, self.first(x).tanh(), use_reentrant=self.reentrant)


@loop
def reentrant_checkpoints():
    model = Checkpointed(reentrant=True)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), plain_step


@loop
def checkpoints():
    model = Checkpointed(reentrant=False)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), plain_step


@loop
def compiled_model():
    model = torch.compile(mlp(), backend="aot_eager", fullgraph=True)
    return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.01)), plain_step


@loop
def compiled_optimizer_step():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    update = torch.compile(lambda: optimizer.step(), backend="aot_eager")

    def step(setup):
        x, y = examples()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        update()
        return loss

    return TrainingSetup(model, optimizer), step


@loop
def compiled_whole_step():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def train(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return TrainingSetup(model, optimizer), lambda setup: train(*examples())


@loop
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, tokens):
            return self.decode(self.encode(tokens).tanh())

    model = Tied()

    def step(setup):
        tokens = torch.randint(7, (5,))
        setup.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        setup.optimizer.step()
        return loss

    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), step


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x):
        return self.experts[random.randrange(2)](x)


@loop
def unused_experts():
    model = Experts()
    return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01)), plain_step


@loop
def data_parallel():
    model = nn.DataParallel(mlp())
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), plain_step


@loop
def dropout():
    model = mlp(middle=[nn.Dropout(0.5), nn.BatchNorm1d(8)])
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), plain_step


@loop
def gradient_scaler():
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    calls = []

    def step(setup):
        x, y = examples()
        calls.append(None)
        setup.optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss * (float("inf") if len(calls) == 2 else 1.0)).backward()
        scaler.unscale_(setup.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(setup.optimizer)
        scaler.update()
        return loss

    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler), step


@loop
def two_optimizers_with_one_scaler():
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "last": nn.Linear(6, 3)})
    optimizers = {
        name: torch.optim.Adam(part.parameters(), lr=0.01, fused=name == "last") for name, part in model.items()
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    calls = []

    def step(setup):
        calls.append(None)
        x, y = examples()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model["last"](model["first"](x).tanh())
        loss = nn.functional.mse_loss(outputs.float(), y)
        torch.autograd.backward(scaler.scale([loss / 2, model["first"].weight.pow(2).sum()]))
        for name, optimizer in setup.optimizers.items():
            if name == "first" or len(calls) % 2 == 0:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                optimizer.zero_grad()
        scaler.update()
        return loss

    return TrainingSetup(model, optimizers, scaler=scaler), step


@loop
def fused_with_scaler():
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(setup):
        x, y = examples()
        setup.optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(setup.optimizer)
        scaler.update()
        return loss

    return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), scaler=scaler), step


@loop
def channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    model = model.to(memory_format=torch.channels_last)

    def step(setup):
        x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        setup.optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        setup.optimizer.step()
        return loss

    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), step


@loop
def double_backward():
    model = mlp()

    def step(setup):
        x, y = examples()
        x.requires_grad_()
        setup.optimizer.zero_grad()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = nn.functional.mse_loss(out, y) + slope.pow(2).mean()
        loss.backward(create_graph=True)
        setup.optimizer.step()
        for p in (x, *model.parameters()):  # each gradient holds the graph that it is a part of
            p.grad = None
        return loss

    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), step


@loop
def averaged_model():
    model = mlp(middle=[nn.BatchNorm1d(8)])
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def step(setup):
        loss = plain_step(setup)
        average.update_parameters(model)
        setup.scheduler.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS)
    return TrainingSetup(model, optimizer, scheduler, state={"ema": average}), step


@loop
def gradients_made_by_hand():
    model = nn.Linear(6, 3)

    def step(setup):
        x, y = examples()
        with torch.inference_mode():
            error = model(x) - y
            model.weight.grad, model.bias.grad = error.T @ x / 12, error.sum(0) / 12
        setup.optimizer.step()
        return error.pow(2).mean().clone()

    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), step


@loop
def functional_gradients():
    model = mlp()

    def step(setup):
        x, y = examples()
        loss = nn.functional.mse_loss(model(x), y)
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = grad
        setup.optimizer.step()
        return loss

    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), step


@loop
def perturbations_with_optimizers_of_their_own():
    model = mlp()

    def step(setup):
        x, y = examples()
        noise = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.SGD([noise], lr=0.1)
        nn.functional.mse_loss(model(x + noise), y).neg().backward()
        inner.step()
        setup.optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x + noise.detach()), y)
        loss.backward()
        setup.optimizer.step()
        return loss

    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), step


@loop
def parametrised_weights():
    weight_norm, spectral_norm = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 3)))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1)), plain_step


@loop
def unfrozen_during_the_run():
    model = mlp()
    model[0].requires_grad_(False)
    calls = []

    def step(setup):
        calls.append(None)
        if len(calls) == 3:
            model[0].requires_grad_(True)
            setup.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        return plain_step(setup)

    return TrainingSetup(model, torch.optim.SGD(model[2].parameters(), lr=0.1)), step
