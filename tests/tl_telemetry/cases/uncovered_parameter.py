"""A part that no optimizer holds, and parts that are rightly in none."""

from __future__ import annotations

import torch
from torch import nn

MESSAGE = """\
[uncovered-parameter] 4 of 6 trainable parameters are in no optimizer: encoder.* (4 tensors) (trainable since step 2 \
of this run)
  cause: no optimizer was given them. Either they were left out when it was built, or they were added to the model or \
unfrozen afterwards
  fix: build the optimizer from model.parameters() once the model is complete, or add them with add_param_group(); if \
they are not meant to train, freeze them with requires_grad_(False) or pass ignore="""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def step_all(setup, batch):
    for optimizer in setup.optimizers.values():
        optimizer.zero_grad()
    loss = loss_fn(setup.model, batch)
    loss.backward()
    for optimizer in setup.optimizers.values():
        optimizer.step()
    return loss


def loop(make_setup, step=step_all, steps=6):
    return {"make_setup": make_setup, "data": data, "step": step, "steps": steps}


def twins(add):
    """Unfreeze the encoder in the third step, and add it to the optimizer or forget to."""

    def make_setup():
        model = Net()
        model.encoder.requires_grad_(False)
        return model, torch.optim.SGD(model.head.parameters(), lr=0.05)

    def step(setup, batch):
        if setup.step_index == 2:
            setup.model.encoder.requires_grad_(True)
            if add:
                setup.optimizer.add_param_group({"params": list(setup.model.encoder.parameters())})
        return step_all(setup, batch)

    return loop(make_setup, step)


def buggy():
    return twins(add=False)


def healthy():
    return twins(add=True)


def make_frozen():
    model = Net()
    model.encoder.requires_grad_(False)
    return model, torch.optim.SGD(model.head.parameters(), lr=0.05)


def make_target():
    """Keep a second network that only gives targets and is copied from the first now and then."""
    model = nn.ModuleDict({"online": Net(), "target": Net()})
    model["target"].load_state_dict(model["online"].state_dict())
    return model, torch.optim.SGD(model["online"].parameters(), lr=0.05)


def towards_target(every):
    def step(setup, batch):
        online, target = setup.model["online"], setup.model["target"]
        with torch.no_grad():
            wanted = batch[1] + 0.5 * target(batch[0])
        setup.optimizer.zero_grad()
        loss = nn.functional.mse_loss(online(batch[0]), wanted)
        loss.backward()
        setup.optimizer.step()
        if (setup.step_index + 1) % every == 0:
            target.load_state_dict(online.state_dict())
        return loss

    return step


def make_features():
    """Leave a part that only gives features in no optimizer, without freezing it."""
    model = Net()
    return model, torch.optim.SGD(model.head.parameters(), lr=0.05)


def on_features(setup, batch):
    setup.optimizer.zero_grad()
    with torch.no_grad():
        features = setup.model.encoder(batch[0])
    loss = nn.functional.mse_loss(setup.model.head(features), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


def make_late():
    """Build the encoder's optimizer only when its turn comes."""
    model = Net()
    model.encoder.requires_grad_(False)
    return model, {"head": torch.optim.SGD(model.head.parameters(), lr=0.05)}


def built_late(setup, batch):
    if setup.step_index == 3:
        setup.model.encoder.requires_grad_(True)
        setup.optimizers["encoder"] = torch.optim.SGD(setup.model.encoder.parameters(), lr=0.05)
    return step_all(setup, batch)


def kept_by_the_loop():
    """Keep one of the optimizers outside of the setup."""
    kept = []

    def make_setup():
        model = Net()
        kept.append(torch.optim.SGD(model.encoder.parameters(), lr=0.05))
        return model, torch.optim.SGD(model.head.parameters(), lr=0.05)

    def step(setup, batch):
        kept[-1].zero_grad()
        setup.optimizer.zero_grad()
        loss = loss_fn(setup.model, batch)
        loss.backward()
        kept[-1].step()
        setup.optimizer.step()
        return loss

    return loop(make_setup, step)


def make_hand():
    model = Net()
    return model, torch.optim.SGD(model.head.parameters(), lr=0.05)


def by_hand(setup, batch):
    """Move the encoder by hand, through data."""
    loss = loss_fn(setup.model, batch)
    loss.backward()
    for p in setup.model.encoder.parameters():
        p.data -= 0.05 * p.grad
        p.grad = None
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return loss


def make_masters():
    """Step float32 copies of the weights and copy them back."""
    model = Net().to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    return model, torch.optim.SGD(masters, lr=0.05)


def with_masters(setup, batch):
    loss = loss_fn(setup.model, [part.to(torch.bfloat16) for part in batch])
    loss.backward()
    masters = setup.optimizer.param_groups[0]["params"]
    for master, p in zip(masters, setup.model.parameters(), strict=True):
        master.grad, p.grad = p.grad.float(), None
    setup.optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, setup.model.parameters(), strict=True):
            p.copy_(master)
    return loss


def near_misses():
    return {
        "frozen": loop(make_frozen),
        "target that follows": loop(make_target, towards_target(2)),
        "target that waits": loop(make_target, towards_target(100)),
        "features only": loop(make_features, on_features),
        "optimizer built late": loop(make_late, built_late),
        "optimizer kept by the loop": kept_by_the_loop(),
        "moved by hand": loop(make_hand, by_hand),
        "master weights": loop(make_masters, with_masters),
    }
