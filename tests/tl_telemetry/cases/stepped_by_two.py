"""Two optimizers that apply the same gradients, and optimizers that share parameters as they should."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[stepped-by-two] 'encoder' and 'rest' both stepped encoder.* (2 tensors) with the same gradients (steps 0-4): each of \
these updates was applied twice
  cause: both optimizers hold these parameters, and no backward pass ran between their steps
  fix: give each parameter to one optimizer"""


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(x).tanh())


def twins(all_of_it):
    def make_setup():
        model = Net()
        rest = model if all_of_it else model.head
        return TrainingSetup(
            model,
            {
                "encoder": torch.optim.SGD(model.encoder.parameters(), lr=0.01),
                "rest": torch.optim.SGD(rest.parameters(), lr=0.1),
            },
        )

    def step(setup, batch):
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss

    return {"make_setup": make_setup, "data": data, "step": step, "steps": 5}


def buggy():
    return twins(all_of_it=True)


def healthy():
    return twins(all_of_it=False)


def make_autoencoder():
    """Give the encoder to two optimizers, one for each loss, as adversarial autoencoders do."""
    model = nn.ModuleDict({"encoder": nn.Linear(4, 2), "decoder": nn.Linear(2, 4), "critic": nn.Linear(2, 1)})
    return TrainingSetup(
        model,
        {
            "rebuild": torch.optim.SGD([*model["encoder"].parameters(), *model["decoder"].parameters()], lr=0.01),
            "fool": torch.optim.SGD(model["encoder"].parameters(), lr=0.01),
            "critic": torch.optim.SGD(model["critic"].parameters(), lr=0.01),
        },
    )


def autoencode(setup, batch):
    """Step the encoder twice a step, each time with the gradients of another loss."""
    encoder, decoder, critic = (setup.model[name] for name in ("encoder", "decoder", "critic"))
    x = batch[0]
    rebuild = nn.functional.mse_loss(decoder(encoder(x)), x)
    setup.model.zero_grad()
    rebuild.backward()
    setup.optimizers["rebuild"].step()
    judge = critic(encoder(x).detach()).mean() - critic(torch.randn(8, 2)).mean()
    setup.model.zero_grad()
    judge.backward()
    setup.optimizers["critic"].step()
    fool = -critic(encoder(x)).mean()
    setup.model.zero_grad()
    fool.backward()
    setup.optimizers["fool"].step()
    return {"rebuild": rebuild, "judge": judge, "fool": fool}


def phases(setup, batch):
    """Warm up with one optimizer, go on with another."""
    optimizer = setup.optimizers["first" if setup.step_index < 3 else "second"]
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make_phases():
    model = Net()
    return TrainingSetup(
        model,
        {
            "first": torch.optim.Adam(model.parameters(), lr=0.01),
            "second": torch.optim.SGD(model.parameters(), lr=0.01),
        },
    )


def near_misses():
    return {
        "one optimizer a loss": {"make_setup": make_autoencoder, "data": data, "step": autoencode, "steps": 5},
        "one optimizer a phase": {"make_setup": make_phases, "data": data, "step": phases, "steps": 6},
    }
