from __future__ import annotations

import torch
from torch import nn

from tl_coverage import check_optimizer_coverage


def keep(model, *, freeze=False):
    """Give a model prompts in a plain list, and a plain tensor to scale with."""
    model.prompts = [nn.Parameter(torch.zeros(2), requires_grad=not freeze) for _ in range(2)]
    model.scale = torch.ones(1, requires_grad=not freeze)
    return model


def test_parameters_in_a_plain_list_are_found(model, sgd):
    """What model.parameters() does not give is in no optimizer; a plain tensor alone is only noted."""
    report = check_optimizer_coverage(keep(model), sgd(model.parameters()))
    assert str(report) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[uncovered-parameter] prompts[0], prompts[1] are in no optimizer: Parameters in a plain list, tuple or dict, "
        "so that model.parameters() does not give them\n"
        "  cause: torch registers only an nn.Parameter that is an attribute of a module, or in an nn.ParameterList or "
        "nn.ParameterDict\n"
        "  fix: keep them in an nn.ParameterList or nn.ParameterDict, and build the optimizer afterwards; if they are "
        "not meant to train, freeze them with requires_grad_(False) or pass ignore=\n\n"
        "Notes:\n"
        "[uncovered-parameter] scale is in no optimizer: a tensor with requires_grad True that the model keeps without "
        "registering\n"
        "  cause: torch registers only an nn.Parameter that is an attribute of a module, or in an nn.ParameterList or "
        "nn.ParameterDict\n"
        "  fix: make what is meant to train an nn.Parameter that is an attribute; a run shows whether gradients reach "
        "it and whether anything moves it"
    )


def test_unregistered_tensors_that_are_settled(model, sgd):
    """Those that an optimizer holds, that are frozen or that are ignored are no matter."""
    keep(model)
    held = [*model.parameters(), *model.prompts, model.scale]
    report = check_optimizer_coverage(model, sgd(held))
    assert report.ok
    assert [note.rule for note in report.notes] == ["foreign-tensor"]
    ignored = check_optimizer_coverage(model, sgd(model.parameters()), ignore=["prompts*", "scale"])
    frozen = check_optimizer_coverage(keep(model, freeze=True), sgd(model.parameters()))
    for settled in (ignored, frozen):
        assert (settled.findings, settled.notes) == ((), ())
