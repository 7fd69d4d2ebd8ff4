"""Updates that round to nothing: weights in bfloat16 with a learning rate that suits float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].sum(1, keepdim=True)

MESSAGE = """\
[update-rounds-away] 98 % of the elements of all 4 parameters that had a gradient did not change when 'optimizer' \
stepped (4 updates looked at, steps 0-3): the updates round to nothing in bfloat16
  cause: bfloat16 represents a weight in steps of 2^-8 to 2^-7 (0.4 to 0.8 %) of its size; an update below half of \
that is lost, and with a learning rate of 1e-05 nearly all of them are
  fix: keep the weights in float32 and compute in low precision under torch.autocast, or raise the learning rate"""


def _net(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(dtype)


def _train(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    setup.optimizer.zero_grad()
    dtype = next(setup.model.parameters()).dtype
    loss = (setup.model(batch[0].to(dtype)).float() - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def _case(dtype: torch.dtype, make_optimizer: Any, steps: int = 8) -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net(dtype)
        return TrainingSetup(model, make_optimizer(list(model.parameters())))

    return {"make_setup": make_setup, "data": (X, Y), "step": _train, "steps": steps}


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5)


def buggy() -> dict[str, Any]:
    return _case(torch.bfloat16, _adamw)


def healthy() -> dict[str, Any]:
    return _case(torch.float32, _adamw)


class _Dithered(torch.optim.Optimizer):
    """Sign descent that rounds up or down at random, so that small updates get through on average."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    exact = p.float() - group["lr"] * p.grad.float().sign()
                    bits = exact.view(torch.int32)
                    bits = (bits + torch.randint_like(bits, 1 << 16)) & ~0xFFFF
                    p.copy_(bits.view(torch.float32))


class _WithCarry(torch.optim.Optimizer):
    """Sign descent that carries what rounding loses over to the next update (Kahan summation)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                carry = state.setdefault("carry", torch.zeros_like(p))
                carry.sub_(group["lr"] * p.grad.sign())
                before = p.clone()
                p.add_(carry)
                carry.sub_(p - before)


class _Stubborn(torch.optim.Optimizer):
    """Sign descent whose Kahan terms have not added up to a change yet."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-7, "kahan_sum": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-group["lr"])


class _Bare:
    """Wraps an optimizer, and has only what a loop calls: no state, no defaults."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.zero_grad, self.step = optimizer.zero_grad, optimizer.step


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "bfloat16 with a rate that suits it": _case(
            torch.bfloat16, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
        ),
        "stochastic rounding": _case(torch.bfloat16, lambda p: _Dithered(p, lr=5e-6)),
        "stochastic rounding, a longer run": _case(torch.bfloat16, lambda p: _Dithered(p, lr=3e-6), steps=34),
        "a carry in the state": _case(torch.bfloat16, lambda p: _WithCarry(p, lr=1e-5), steps=20),
        "float32 masters": _masters(),
        "an optimizer that says it compensates": _case(torch.bfloat16, _Stubborn),
        "a bare wrapper around one that says so": _case(torch.bfloat16, lambda p: _Bare(_Stubborn(p))),
        "a bare wrapper, in float32": _case(torch.float32, lambda p: _Bare(_adamw(p))),
        "sparse gradients of an embedding in bfloat16": _sparse_embedding(),
    }


def _masters() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = _net(torch.bfloat16)
        setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01))
        setup.masters = [p.detach().float() for p in model.parameters()]
        # stepped by the optimizer, copied back into the model by the step
        setup.optimizers["optimizer"] = torch.optim.AdamW(setup.masters, lr=1e-5)
        return setup

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        loss = (setup.model(batch[0].bfloat16()).float() - batch[1]).square().mean()
        loss.backward()
        for p, master in zip(setup.model.parameters(), setup.masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        setup.optimizer.step()
        with torch.no_grad():
            for p, master in zip(setup.model.parameters(), setup.masters, strict=True):
                p.copy_(master)
        return loss

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "steps": 8}


def _sparse_embedding() -> dict[str, Any]:
    def make_setup() -> TrainingSetup:
        model = nn.Embedding(50, 8, sparse=True, dtype=torch.bfloat16)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = setup.model(batch).float().square().mean(1).sum()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": torch.arange(12), "step": step, "steps": 6}
