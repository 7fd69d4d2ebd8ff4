from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tl_coverage import check_optimizer_coverage


class Language(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.out = nn.Linear(8, 12, bias=False)
        tie(self)


def by_data(model):
    model.out.weight.data = model.emb.weight.data


def by_parameter(model):
    model.out.weight = model.emb.weight


def by_part(model):
    model.out.weight = nn.Parameter(model.emb.weight.detach()[:6])


CAUSE = (
    "  cause: sharing memory (through .data or a view) does not tie weights: each Parameter has a gradient of its own\n"
    "  fix: tie them by assigning the Parameter itself, model.out.weight = model.emb.weight, before the optimizer is "
    "built; if they are not meant to be tied, give each its own memory with .clone()"
)
BOTH = "both are in an optimizer, which updates this memory once for each, with a part of the gradient each time"


@pytest.mark.parametrize(("tie", "extent"), [(by_data, "all of it"), (by_part, "a part of it")])
def test_parameters_that_share_memory_are_found(tie, extent, sgd):
    """Weights tied through .data, or as a view, are two Parameters that are updated twice."""
    model = Language(tie)
    report = check_optimizer_coverage(model, sgd(model.parameters()))
    assert str(report) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        f"[shared-memory] emb.weight and out.weight are two Parameters that share memory ({extent}); {BOTH}\n" + CAUSE
    )
    assert report.findings[0].parameters == ("emb.weight", "out.weight")


def test_one_in_an_optimizer_is_said_and_counts_once(sgd):
    """When only one of the two is in an optimizer, that is part of the same finding."""
    model = Language(by_data)
    assert str(check_optimizer_coverage(model, sgd(model.out.parameters()))) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[shared-memory] emb.weight and out.weight are two Parameters that share memory (all of it); "
        "only out.weight is in an optimizer, so the gradient of the other is lost\n" + CAUSE
    )


def test_neither_in_an_optimizer_is_said_too(sgd):
    """Both missing is a finding of its own, besides the shared memory."""
    model = Language(by_data)
    model.extra = nn.Parameter(torch.zeros(3, 3))
    report = check_optimizer_coverage(model, sgd([model.extra]))
    assert [finding.rule for finding in report.findings] == ["shared-memory", "uncovered-parameter"]
    assert report.findings[0].seen.endswith("; neither is in an optimizer")


def test_tied_weights_are_left_alone(sgd):
    """One Parameter under two names is what tying means."""
    model = Language(by_parameter)
    assert str(check_optimizer_coverage(model, sgd(model.parameters()))) == "Optimizer coverage: passed"


def flat(model):
    """Put all parameters into one flat storage, one behind the other."""
    storage = torch.zeros(sum(p.numel() for p in model.parameters()))
    start = 0
    for parameter in model.parameters():
        parameter.data = storage[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def columns(model):
    """Make the parameters columns of one matrix: their addresses interleave, their elements do not."""
    matrix = torch.zeros(12, 16)
    model.emb.weight.data = matrix[:, :8]
    model.out.weight.data = matrix[:, 8:]


@pytest.mark.parametrize("layout", [flat, columns])
def test_disjoint_parts_of_one_storage_are_left_alone(layout, sgd):
    """Sharing a storage without sharing an element is fine."""
    model = Language(layout)
    assert check_optimizer_coverage(model, sgd(model.parameters())).ok


def test_interleaved_views_that_do_overlap_are_found(sgd):
    """One shared column is enough."""

    def overlapping(model):
        matrix = torch.zeros(12, 16)
        model.emb.weight.data = matrix[:, :8]
        model.out.weight.data = matrix[:, 7:15]

    model = Language(overlapping)
    (finding,) = check_optimizer_coverage(model, sgd(model.parameters())).findings
    assert finding.rule == "shared-memory"


def test_views_too_large_to_mark_are_left_alone(sgd, monkeypatch):
    """Interleaved views are compared byte by byte up to a size; above it they are not called shared."""
    monkeypatch.setattr("tl_coverage._spans.MAX_MARKED", 256)
    model = Language(columns)
    assert check_optimizer_coverage(model, sgd(model.parameters())).ok


def test_frozen_parameters_may_share_memory(sgd):
    """A frozen part that looks at trained memory (a teacher) is not updated itself."""
    model = Language(by_data)
    model.out.requires_grad_(False)
    assert check_optimizer_coverage(model, sgd(model.parameters())).ok


def test_parameters_without_memory_are_left_alone(sgd):
    """Lazy, meta and empty parameters have no memory to share."""
    model = nn.ModuleList(
        [nn.LazyLinear(2), nn.LazyLinear(2), nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")]
    )
    model.nothing, model.empty = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 3))
    assert check_optimizer_coverage(model, sgd(model.parameters())).ok


class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a value was read"
        return func(*args, **(kwargs or {}))


def test_no_value_is_read(model, sgd):
    """Only addresses and shapes are looked at: nobody waits for the device."""
    optimizer = sgd(model.parameters())
    with NoSync():
        assert check_optimizer_coverage(model, optimizer, no_decay=["*.bias"]).ok


def test_reading_a_value_is_seen():
    """The test above can fail: the guard goes off for float(tensor)."""
    with NoSync(), pytest.raises(AssertionError, match="a value was read"):
        float(torch.ones(()))
