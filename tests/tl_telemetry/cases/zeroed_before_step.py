"""``zero_grad()`` between ``backward()`` and ``step()``, and loops that rightly clear gradients there."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[zeroed-before-step] the gradients of all 4 parameters were None when 'optimizer' stepped, although a backward pass \
had filled them just before (6 of 6 updates, steps 0-5)
  cause: they were cleared between backward() and step(), as by a zero_grad() in the wrong place: the update has no \
gradient to apply
  fix: move zero_grad() before backward(), or after step()"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def make_setup():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(setup, batch):
    return nn.functional.mse_loss(setup.model(batch[0]), batch[1])


def loop(step, make_setup=make_setup):
    return {"make_setup": make_setup, "data": data, "step": step, "steps": 6}


def twins(early):
    def step(setup, batch):
        loss = loss_of(setup, batch)
        if early:
            setup.optimizer.zero_grad()
        loss.backward()
        if not early:
            setup.optimizer.zero_grad()
        setup.optimizer.step()
        return loss

    return loop(step)


def buggy():
    return twins(early=False)


def healthy():
    return twins(early=True)


def logged(setup, batch):
    """Log the gradient norm of one loss by a pass of its own, and clear it again."""
    loss = loss_of(setup, batch)
    loss.backward(retain_graph=True)
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return loss


def projected(setup, batch):
    """Compute two tasks' gradients apart and put their projected sum in place, as PCGrad does."""
    parameters = list(setup.model.parameters())
    taken = []
    output = setup.model(batch[0])
    for loss in (nn.functional.mse_loss(output, batch[1]), output.abs().mean()):
        setup.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        taken.append([p.grad.clone() for p in parameters])
    setup.optimizer.zero_grad()
    for parameter, first, second in zip(parameters, *taken, strict=True):
        dot = (first * second).sum()
        parameter.grad = first + second - (dot < 0) * dot / second.square().sum() * second
    setup.optimizer.step()
    return loss


def projected_in_place(setup, batch):
    """Put a clipped and noised mean of gradients per example in place, as private training does."""
    parameters = list(setup.model.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for x, y in zip(*batch, strict=True):
        setup.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(setup.model(x[None]), y[None])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        torch._foreach_add_(sums, [p.grad for p in parameters])
    for parameter, whole in zip(parameters, sums, strict=True):
        parameter.grad.copy_(whole / len(batch[0]) + 0.01 * torch.randn_like(whole))
    setup.optimizer.step()
    return loss


class Sharpness(torch.optim.Optimizer):
    """Climb to the worst weights nearby, take the gradient there, and step from where it was."""

    def __init__(self, params, base, **kwargs):
        super().__init__(params, {"rho": 0.05, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        for group in self.param_groups:
            for p in group["params"]:
                move = 0.05 * p.grad / (p.grad.norm() + 1e-12)
                p.add_(move)
                self.state[p]["move"] = move
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["move"])
        self.base.step()
        self.zero_grad()


def make_sharpness():
    model, _ = make_setup()
    return model, Sharpness(model.parameters(), torch.optim.SGD, lr=0.01)


def climbs(setup, batch):
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizer.climb()
    loss_of(setup, batch).backward()
    setup.optimizer.step()
    return loss


def last_layer_held(setup, batch):
    """Drop the last layer's gradients in the first steps, as DINO does."""
    loss = loss_of(setup, batch)
    loss.backward()
    if setup.step_index < 4:
        for parameter in setup.model[2].parameters():
            parameter.grad = None
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return loss


def make_in_backward():
    """Step each parameter in a hook, as soon as its gradient is there."""
    model, _ = make_setup()
    optimizers = {name: torch.optim.SGD([p], lr=0.01) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():

        def hook(parameter, name=name):
            optimizers[name].step()
            optimizers[name].zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    return TrainingSetup(model, optimizers)


def in_backward(setup, batch):
    loss = loss_of(setup, batch)
    loss.backward()
    return loss


def adversary_balanced(setup, batch):
    """Leave one update of a part out by clearing its gradients, when it is ahead."""
    loss = loss_of(setup, batch)
    loss.backward()
    if setup.step_index in (2, 5):
        setup.optimizer.zero_grad()
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return loss


def averaged_by_hand(setup, batch):
    """Divide the gradients by the number of micro-batches before the step."""
    setup.optimizer.zero_grad()
    for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
        loss = nn.functional.mse_loss(setup.model(x), y)
        loss.backward()
    for parameter in setup.model.parameters():
        parameter.grad /= 2
    setup.optimizer.step()
    return loss


def in_chunks(setup, batch):
    """Take the gradient at the outputs first, then carry it through the model chunk by chunk."""
    with torch.no_grad():
        outputs = setup.model(batch[0])
    outputs.requires_grad_()
    loss = nn.functional.mse_loss(outputs, batch[1])
    loss.backward()
    setup.optimizer.zero_grad()
    for x, grad in zip(batch[0].split(4), outputs.grad.split(4), strict=True):
        (setup.model(x) * grad).sum().backward()
    setup.optimizer.step()
    return loss


def against_attacks(setup, batch):
    """Find the worst inputs nearby by backward passes that fill the weights' gradients too."""
    x = batch[0]
    for _ in range(2):
        x = x.detach().requires_grad_()
        nn.functional.mse_loss(setup.model(x), batch[1]).backward()
        x = x + 0.1 * x.grad.sign()
    setup.optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.mse_loss(setup.model(x.detach()), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


def buffered(setup, batch):
    """Accumulate four micro-batches in buffers of the loop's own."""
    loss = loss_of(setup, batch)
    loss.backward()
    if setup.step_index % 4 == 0:
        setup.sums = [torch.zeros_like(p) for p in setup.model.parameters()]
    for whole, p in zip(setup.sums, setup.model.parameters(), strict=True):
        whole += p.grad / 4
    setup.optimizer.zero_grad()
    if setup.step_index % 4 == 3:
        for whole, p in zip(setup.sums, setup.model.parameters(), strict=True):
            p.grad = whole
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return loss


def near_misses():
    return {
        "in chunks": loop(in_chunks),
        "against attacks": loop(against_attacks),
        "in buffers": {**loop(buffered), "steps": 12},
        "logged by a pass of its own": loop(logged),
        "projected": loop(projected),
        "copied in place": loop(projected_in_place),
        "sharpness aware": loop(climbs, make_sharpness),
        "last layer held": loop(last_layer_held),
        "in backward": loop(in_backward, make_in_backward),
        "one part held back": loop(adversary_balanced),
        "averaged by hand": loop(averaged_by_hand),
    }
