import torch
from torch import nn
from torch.nn import functional as F

from tl_core import TrainingSetup

RULE = "frozen-parameter"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))


def loop(call_the_method):
    def make_setup():
        model = Net()
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        if call_the_method:
            model.norm.requires_grad_(True)
        else:
            model.norm.requires_grad = True
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(setup, batch):
        x, y = batch
        setup.optimizer.zero_grad()
        loss = F.mse_loss(setup.model(x), y)
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    return {"make_setup": make_setup, "data": (x, x.sum(1, keepdim=True)), "step": step}


def buggy():
    return loop(call_the_method=False)


def healthy():
    return loop(call_the_method=True)


MESSAGE = """\
[frozen-parameter] norm.* (2 tensors) are frozen, but model.norm has the plain attribute requires_grad = True
  cause: model.norm.requires_grad = True sets an attribute of the module and leaves its parameters as they were
  fix: call model.norm.requires_grad_(True)"""
