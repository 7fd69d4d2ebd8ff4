"""The small model of these tests, and an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=16, outputs=1):
        super().__init__()
        self.enc = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)


@pytest.fixture
def model():
    """A model with enc, norm and head, of two tensors each."""
    return Net()


@pytest.fixture
def sgd():
    """A function from parameters to an optimizer."""
    return lambda params, **kwargs: torch.optim.SGD(params, lr=0.1, **kwargs)
