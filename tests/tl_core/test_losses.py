from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tl_core import split_losses

ALLOWED = "return the loss: a real tensor with one element, a number, or a dict of named ones"


@pytest.mark.parametrize(
    "result",
    [2.5, torch.tensor(2.5), torch.tensor([2.5]), torch.tensor([[2.5]]), numpy.float32(2.5), numpy.array([2.5])],
)
def test_one_loss_is_named_loss(result):
    """Numbers, and tensors or arrays with one element, are the loss."""
    losses, main = split_losses(result, 0)
    assert main == "loss"
    assert {name: float(value) for name, value in losses.items()} == {"loss": 2.5}


def test_whole_numbers_are_losses():
    """Integers, python's or numpy's, count as numbers."""
    assert split_losses(3, 0)[0] == {"loss": 3.0}
    assert split_losses(numpy.int64(3), 0)[0] == {"loss": 3.0}


def test_a_loss_may_be_nan():
    """Whether a loss is finite is not decided here."""
    assert math.isnan(split_losses(float("nan"), 0)[0]["loss"])


@pytest.mark.parametrize(("names", "main"), [(["a", "loss", "b"], "loss"), (["a", "b"], "a"), (["total"], "total")])
def test_the_main_loss_is_loss_or_the_first(names, main):
    """Of named losses, `loss` is the main one, else the first."""
    losses, found = split_losses(dict.fromkeys(names, 1.0), 0)
    assert (list(losses), found) == (names, main)


def test_tensors_are_detached_copies():
    """A loss that is changed in place later (a running sum) does not change what was recorded."""
    loss = torch.tensor([1.0], requires_grad=True) * 1
    recorded = split_losses(loss, 0)[0]["loss"]
    loss.detach().add_(5)
    assert float(recorded) == 1.0
    assert recorded.shape == ()
    assert not recorded.requires_grad


class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a value was read"
        return func(*args, **(kwargs or {}))


def test_no_value_is_read():
    """Tensors stay where they are: nobody waits for the device."""
    with NoSync():
        split_losses({"loss": torch.ones(1), "aux": torch.ones(())}, 0)


def test_reading_a_value_is_seen():
    """The test above can fail: the guard goes off for float(tensor)."""
    with NoSync(), pytest.raises(AssertionError, match="a value was read"):
        float(torch.ones(()))


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (None, TypeError, f"step() returned None at step 7; {ALLOWED}"),
        ("low", TypeError, f"step() returned a str 'low' at step 7; {ALLOWED}"),
        (True, TypeError, f"step() returned a bool True at step 7; {ALLOWED}"),
        (1j, TypeError, f"step() returned a complex 1j at step 7; {ALLOWED}"),
        ((1.0, 2), TypeError, f"step() returned a tuple at step 7; {ALLOWED}"),
        (torch.ones(2, 3), ValueError, f"step() returned a tensor of shape (2, 3) at step 7; {ALLOWED}"),
        (torch.ones(1, dtype=torch.cfloat), TypeError, f"step() returned a complex64 tensor at step 7; {ALLOWED}"),
        (torch.tensor(True), TypeError, f"step() returned a bool tensor at step 7; {ALLOWED}"),
        (numpy.ones(3), ValueError, f"step() returned an array of shape (3,) at step 7; {ALLOWED}"),
        (numpy.array("a"), TypeError, f"step() returned a <U1 array at step 7; {ALLOWED}"),
        ({}, ValueError, f"step() returned an empty dict at step 7; {ALLOWED}"),
        ({"loss": None}, TypeError, f"step() returned a dict whose 'loss' is None at step 7; {ALLOWED}"),
        (
            {"loss": 1.0, "logits": torch.ones(4)},
            ValueError,
            f"step() returned a dict whose 'logits' is a tensor of shape (4,) at step 7; {ALLOWED}",
        ),
        ({0: 1.0}, TypeError, f"step() returned a dict with the key 0, which is no string, at step 7; {ALLOWED}"),
    ],
)
def test_what_is_no_loss_is_refused(result, error, message):
    """The error names what was returned, the step, and what is allowed."""
    with pytest.raises(error) as caught:
        split_losses(result, 7)
    assert str(caught.value) == message


class ModelOutput(OrderedDict):
    """As in transformers: a mapping of what is not None, with attributes of the same names."""


@dataclasses.dataclass
class CausalLMOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


@dataclasses.dataclass
class EncoderOutput(ModelOutput):
    hidden: torch.Tensor | None = None

    def __post_init__(self):
        self["hidden"] = self.hidden


@pytest.mark.parametrize("output", [CausalLMOutput, ModelOutput])
def test_only_the_loss_of_a_models_output_counts(output):
    """Logits beside the loss of a transformers model are no losses."""
    losses, main = split_losses(output(loss=torch.tensor(2.5), logits=torch.ones(2, 3)), 0)
    assert main == "loss"
    assert {name: float(value) for name, value in losses.items()} == {"loss": 2.5}


def test_the_output_of_a_model_without_labels_has_no_loss():
    """A transformers model computes a loss only where it is given labels, and the error says so."""
    with pytest.raises(TypeError) as caught:
        split_losses(CausalLMOutput(logits=torch.ones(2, 3)), 4)
    assert str(caught.value) == (
        "step() returned a CausalLMOutput whose loss is None at step 4: the model computes one where the batch holds "
        "labels"
    )


def test_the_output_of_a_model_that_computes_no_loss_is_read_as_named_losses():
    """Hidden states are no losses: the error names what was got."""
    with pytest.raises(ValueError) as caught:
        split_losses(EncoderOutput(torch.ones(2, 3)), 1)
    assert str(caught.value) == (
        f"step() returned a EncoderOutput whose 'hidden' is a tensor of shape (2, 3) at step 1; {ALLOWED}"
    )


def test_a_plain_dict_keeps_all_of_its_losses():
    """A dict of named losses is no model's output, whatever else it holds."""
    losses, _ = split_losses(OrderedDict(loss=1.0, aux=2.0), 0)
    assert losses == {"loss": 1.0, "aux": 2.0}
