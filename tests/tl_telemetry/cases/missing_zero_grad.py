"""Gradients that nobody clears, and the many right places and ways to clear them."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[missing-zero-grad] the gradients that 'optimizer' stepped with still held those of its earlier updates (7 of 8 \
updates, steps 1-7): at step 7 a norm of 35 was left over when backward() added to it, and the sum had a norm of 40
  cause: nothing cleared them between an update and the next backward(), which adds to what it finds
  fix: call zero_grad() once an update, before backward() or after step()"""

# The loss is linear in the weights, so that each backward pass gives the gradient (3, 4), of norm 5.
ROW = torch.tensor([[3.0, 4.0]])


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(setup, batch):
    return nn.functional.mse_loss(setup.model(batch[0]), batch[1])


def loop(clear):
    def make_linear():
        model = nn.Linear(2, 1, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def step(setup, batch):
        if clear:
            setup.optimizer.zero_grad()
        loss = setup.model(batch).sum()
        loss.backward()
        setup.optimizer.step()
        return loss

    return {"make_setup": make_linear, "data": ROW, "step": step, "steps": 8}


def buggy():
    return loop(clear=False)


def healthy():
    return loop(clear=True)


def plain(clear, make_setup=make_setup):
    """Make a loop that clears with ``clear(setup)`` after its step."""

    def step(setup, batch):
        loss = loss_of(setup, batch)
        loss.backward()
        setup.optimizer.step()
        clear(setup)
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 8}


def zero_in_place(setup):
    for parameter in setup.model.parameters():
        parameter.grad.zero_()


def zero_through_data(setup):
    for parameter in setup.model.parameters():
        parameter.grad.data.zero_()


def zero_all_at_once(setup):
    torch._foreach_zero_([parameter.grad for parameter in setup.model.parameters()])


def drop(setup):
    for parameter in setup.model.parameters():
        parameter.grad = None


def make_fused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def accumulation(last_group):
    """Accumulate over 4 micro-batches; with ``last_group`` an epoch of 10 ends with a group of 2."""

    def step(setup, batch):
        in_epoch = setup.step_index % 10 if last_group else setup.step_index
        loss = loss_of(setup, batch)
        (loss / 4).backward()
        if (in_epoch + 1) % 4 == 0 or (last_group and in_epoch == 9):
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 20}


def zero_at_start_of_cycle(setup, batch):
    if setup.step_index % 4 == 0:
        setup.optimizer.zero_grad(set_to_none=False)
    loss = loss_of(setup, batch)
    (loss / 4).backward()
    if setup.step_index % 4 == 3:
        setup.optimizer.step()
    return loss


def zero_after_scheduler(setup, batch):
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizer.step()
    setup.scheduler.step()
    setup.model.zero_grad()
    return loss


def make_scheduled():
    model, optimizer = make_setup()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)


def two_rates(setup, batch):
    """Step the head in every step, and the body with what four steps gave it."""
    body, head = setup.optimizers["body"], setup.optimizers["head"]
    loss = loss_of(setup, batch)
    loss.backward()
    head.step()
    head.zero_grad()
    if setup.step_index % 4 == 3:
        body.step()
        body.zero_grad()
    return loss


def make_two():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TrainingSetup(
        model,
        {
            "body": torch.optim.SGD(model[0].parameters(), lr=0.01),
            "head": torch.optim.SGD(model[2].parameters(), lr=0.01),
        },
    )


def skip_large(setup, batch):
    """Leave the update out, with the gradients, when their norm is out of bounds."""
    loss = loss_of(setup, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(setup.model.parameters(), 10.0)
    if not torch.isfinite(norm) or setup.step_index == 3:
        setup.optimizer.zero_grad()
        return loss
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return loss


def decayed_gradients(setup, batch):
    """Keep a running sum of gradients, on purpose."""
    for parameter in setup.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizer.step()
    return loss


def make_lbfgs():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


def with_closure(setup, batch):
    def closure():
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        loss.backward()
        return loss

    return setup.optimizer.step(closure)


def make_sparse():
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1))
    return TrainingSetup(
        model,
        [
            torch.optim.SparseAdam(model[0].parameters(), lr=0.01),
            torch.optim.SGD(model[1].parameters(), lr=0.01),
        ],
    )


def sparse(setup, batch):
    for optimizer in setup.optimizers.values():
        optimizer.zero_grad()
    loss = setup.model(batch).square().mean()
    loss.backward()
    for optimizer in setup.optimizers.values():
        optimizer.step()
    return loss


def masked_by_hook(clear):
    """Mask gradients with a hook on the parameter, as pruning does."""

    def make_masked():
        model, optimizer = make_setup()
        mask = torch.arange(32).reshape(8, 4) % 2
        model[0].weight.register_hook(lambda grad: grad * mask)
        return model, optimizer

    return plain(clear, make_masked)


def near_misses():
    def loop(step, make_setup=make_setup, data=data, steps=12):
        return {"make_setup": make_setup, "data": data, "step": step, "steps": steps}

    return {
        "zeroed in place": plain(zero_in_place),
        "zeroed through data": plain(zero_through_data),
        "zeroed all at once": plain(zero_all_at_once),
        "dropped": plain(drop),
        "zeros kept": plain(lambda setup: setup.optimizer.zero_grad(set_to_none=False)),
        "fused": plain(lambda setup: setup.optimizer.zero_grad(set_to_none=False), make_fused),
        "accumulated": accumulation(last_group=False),
        "accumulated with a shorter last group": accumulation(last_group=True),
        "zeroed at the start of a cycle": loop(zero_at_start_of_cycle),
        "zeroed after the scheduler": loop(zero_after_scheduler, make_scheduled),
        "two rates": loop(two_rates, make_two),
        "large ones skipped": loop(skip_large),
        "running sum": loop(decayed_gradients),
        "closure": loop(with_closure, make_lbfgs, steps=4),
        "sparse": loop(sparse, make_sparse, torch.arange(12).reshape(4, 3) % 10),
        "masked by a hook": masked_by_hook(lambda setup: setup.optimizer.zero_grad(set_to_none=False)),
    }
