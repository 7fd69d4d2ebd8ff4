"""The optimizer that a Trainer builds: every parameter in one group, weight decay where it belongs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Trainer

from tl_core import CheckFailed
from tl_hf import assert_hf_optimizer_coverage, check_hf_optimizer_coverage


@pytest.mark.parametrize("model", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_trainers_own_optimizer_passes(hf, model, weight_decay):
    """It sorts biases and norms out of weight decay by itself."""
    trainer = hf.trainer(getattr(hf, model)(), weight_decay=weight_decay)
    assert str(assert_hf_optimizer_coverage(trainer)) == "Optimizer coverage: passed"
    assert trainer.optimizer is None


def test_a_trainer_that_has_one_keeps_it(hf):
    """After a training, its optimizer is looked at, inside of accelerate's wrapper."""
    trainer = hf.trainer(max_steps=1, weight_decay=0.1)
    trainer.train()
    optimizer = trainer.optimizer
    assert check_hf_optimizer_coverage(trainer).ok
    assert trainer.optimizer is optimizer


class RootMeanSquareNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, inputs):
        return inputs * inputs.square().mean(-1, keepdim=True).rsqrt() * self.scale


class Scaled(nn.Module):
    """A norm of one's own, under a name that does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.before = RootMeanSquareNorm(3)
        self.net = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 1)])

    def forward(self, inputs, labels):
        return {"loss": (self.net[1](self.net[0](self.before(inputs))) - labels).square().mean()}


DATA = {"inputs": torch.ones(8, 3), "labels": torch.ones(8, 1)}


def test_a_norm_that_the_trainer_does_not_know_is_found(hf):
    """A Trainer goes by nn.LayerNorm and by names; a norm of one's own is decayed, and told."""
    with pytest.raises(CheckFailed) as caught:
        assert_hf_optimizer_coverage(hf.trainer(Scaled(), DATA, weight_decay=0.1))
    assert list(map(str, caught.value.findings)) == [
        "[decayed-parameter] before.scale matches no_decay, but group 0 of the optimizer decays it with "
        "weight_decay=0.1\n"
        "  cause: there is a group without weight decay, but this parameter was not sorted into it\n"
        "  fix: override get_decay_parameter_names() in your Trainer's class, and leave them out there; or give the "
        "module "
        "the name norm, or one that ends in _norm, by which the Trainer knows it"
    ]
    assert check_hf_optimizer_coverage(hf.trainer(Scaled(), DATA)).ok


@pytest.mark.parametrize("name", ["norm", "first_norm"])
def test_a_norm_of_a_name_that_says_so_passes(hf, name):
    """As the fix says."""
    model = nn.Module()
    model.add_module(name, RootMeanSquareNorm(3))
    model.add_module("head", nn.Linear(3, 1))
    assert check_hf_optimizer_coverage(hf.trainer(model, DATA, weight_decay=0.1)).ok


class NormedLinear(nn.Linear):
    """A layer on normed inputs: its weight is a matrix as any."""


class CosineNormHead(nn.Module):
    """The same, of its own."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.ones(classes, size))
        self.temperature = nn.Parameter(torch.ones(()))


class PreNormBlock(nn.Module):
    """A block that holds layers, and a vector."""

    def __init__(self, size: int, _: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.ones(size))


@pytest.mark.parametrize("layer", [NormedLinear, CosineNormHead, PreNormBlock])
def test_what_only_has_norm_in_its_name_decays(hf, layer):
    """A layer with a matrix, or with layers inside, is no normalisation layer whatever its class is called."""
    model = nn.Sequential(nn.LayerNorm(3), layer(3, 4))
    assert str(check_hf_optimizer_coverage(hf.trainer(model, DATA, weight_decay=0.1))) == "Optimizer coverage: passed"


class Centred(nn.LayerNorm):
    """torch's norm by another name, over a matrix."""


class ChannelNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, size, 1, 1))


@pytest.mark.parametrize(("layer", "name"), [(Centred((2, 3)), "layer.weight"), (ChannelNorm(3), "layer.weight")])
def test_norms_by_what_they_are(hf, layer, name):
    """A norm of torch's under any name, and one whose vector is shaped for images, must not decay."""

    class All(Trainer):
        def get_decay_parameter_names(self, model):
            return [name for name, _ in model.named_parameters() if not name.endswith("bias")]

    model = nn.Module()
    model.add_module("layer", layer)
    model.add_module("head", nn.Linear(3, 1))
    findings = check_hf_optimizer_coverage(hf.trainer(model, DATA, trainer_class=All, weight_decay=0.1)).findings
    assert [(finding.rule, finding.parameters) for finding in findings] == [("decayed-parameter", (name,))]


def test_patterns_of_ones_own(hf):
    """They take the place of biases and norms."""
    trainer = hf.trainer(Scaled(), DATA, weight_decay=0.1)
    assert check_hf_optimizer_coverage(trainer, no_decay=["*.bias"]).ok
    assert check_hf_optimizer_coverage(trainer, ignore=["before.scale"]).ok
    assert [f.parameters for f in check_hf_optimizer_coverage(trainer, no_decay=["net.0.*"]).findings] == [
        ("net.0.weight",)
    ]


class Positions(nn.Module):
    """A weight that the Trainer takes for a bias, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.position_bias = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, inputs, labels):
        return {"loss": (self.head(inputs + self.position_bias.weight[0]) - labels).square().mean()}


def test_what_the_trainer_leaves_undecayed_is_no_news(hf):
    """A matrix that is called a bias is not decayed; with patterns of one's own that is noted."""
    trainer = hf.trainer(Positions(), DATA, weight_decay=0.1)
    assert str(check_hf_optimizer_coverage(trainer)) == "Optimizer coverage: passed"
    notes = check_hf_optimizer_coverage(trainer, no_decay=["head.bias"]).notes
    assert [(note.rule, note.parameters) for note in notes] == [("undecayed-parameter", ("position_bias.weight",))]


class HeadOnly(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(self.model.net[1].parameters(), lr=0.1, weight_decay=0.1)
        return self.optimizer


class ReturnsNothing(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


def test_an_optimizer_of_the_persons_own(hf):
    """What it misses, and what it decays, is found; an override that returns nothing will do."""
    report = check_hf_optimizer_coverage(hf.trainer(Scaled(), DATA, trainer_class=HeadOnly))
    assert [finding.rule for finding in report.findings] == ["uncovered-parameter", "decayed-parameter"]
    assert report.findings[1].parameters == ("net.1.bias",)
    assert check_hf_optimizer_coverage(hf.trainer(Scaled(), DATA, trainer_class=ReturnsNothing)).ok


def test_a_model_without_biases_and_norms(hf):
    """There is nothing that must not be decayed."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.ones(3)])

        def forward(self, inputs):
            return {"loss": (inputs * self.weights[0]).sum()}

    assert check_hf_optimizer_coverage(hf.trainer(Bare(), {"inputs": torch.ones(8, 3)}, weight_decay=0.1)).ok


def test_misuse_is_named(hf):
    """A Trainer, and patterns that match something."""
    with pytest.raises(TypeError) as caught:
        check_hf_optimizer_coverage(hf.llama())
    assert str(caught.value) == "trainer must be a transformers.Trainer, got a LlamaForCausalLM"
    with pytest.raises(ValueError, match="no_decay"):
        check_hf_optimizer_coverage(hf.trainer(), no_decay=["nothing"])
