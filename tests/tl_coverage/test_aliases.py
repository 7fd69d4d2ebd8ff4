from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tl_coverage import check_optimizer_coverage

EVERYTHING = "enc.* (2 tensors), norm.* (2 tensors), head.* (2 tensors)"
DETACHED_CAUSE = (
    "  cause: the optimizer was given detached aliases, as model.state_dict().values(), p.data and p.detach() are: "
    "backward() fills the gradients of the Parameters, never those of their aliases, and an optimizer leaves out what "
    "has no gradient\n"
    "  fix: build the optimizer from the Parameters themselves, as model.parameters() gives them"
)
WRAPPED_CAUSE = (
    "  cause: undecided: the Parameters were wrapped anew, as by nn.Parameter(p.data), for the optimizer or in the "
    "model after it was built, or the model is called with these tensors in place of its own parameters "
    "(torch.func.functional_call)\n"
    "  fix: build the optimizer from the Parameters themselves, as model.parameters() gives them, after the last "
    "change to the model; if it is called with these tensors on purpose, name its own parameters in ignore="
)


def rules(report):
    return [finding.rule for finding in report.findings], [note.rule for note in report.notes]


# Detached aliases

ALIASES = {
    "state_dict": lambda model: model.state_dict().values(),
    "data": lambda model: [p.data for p in model.parameters()],
    "detach": lambda model: [p.detach() for p in model.parameters()],
}


@pytest.mark.parametrize("aliases", ALIASES.values(), ids=ALIASES)
def test_detached_aliases_are_found(model, sgd, aliases):
    """An optimizer over state_dict().values() holds the memory, but tensors that never get a gradient."""
    report = check_optimizer_coverage(model, sgd(list(aliases(model))))
    assert str(report) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        f"[uncovered-parameter] 6 of 6 trainable parameters are in no optimizer: {EVERYTHING}; the optimizer holds 6 "
        "aliases of them instead (other tensors in the same memory, with requires_grad False and no gradient)\n"
        + DETACHED_CAUSE
    )
    (finding,) = report.findings
    assert finding.parameters == tuple(name for name, _ in model.named_parameters())
    assert finding.evidence == {"num_uncovered": 6, "num_trainable": 6, "num_aliases": 6}


def test_the_aliases_of_the_rest_of_the_model_belong_to_them(sgd):
    """What a state_dict holds of buffers, frozen and ignored parameters is counted in the same finding."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = sgd(list(model.state_dict().values()))
    (finding,) = check_optimizer_coverage(model, optimizer, ignore=["3.*"]).findings
    assert finding.seen == (
        "4 of 4 trainable parameters are in no optimizer: 1.* (2 tensors), 2.* (2 tensors); the optimizer holds 4 "
        "aliases of them instead (other tensors in the same memory, with requires_grad False and no gradient), and 7 "
        "of other parameters or buffers of the model"
    )


def test_one_alias_among_parameters_is_found(model):
    """One alias, in one of two optimizers, is named with its optimizer."""
    optimizers = {
        "most": torch.optim.SGD([p for n, p in model.named_parameters() if n != "head.bias"], lr=0.1),
        "last": torch.optim.SGD([model.head.bias.data], lr=0.1),
    }
    report = check_optimizer_coverage(model, optimizers)
    assert rules(report) == (["uncovered-parameter"], [])
    assert report.findings[0].seen == (
        "1 of 6 trainable parameters is in no optimizer: head.bias; optimizer 'last' holds 1 alias of it instead "
        "(another tensor in the same memory, with requires_grad False and no gradient)"
    )


def test_what_has_no_alias_is_uncovered_beside_them(model, sgd):
    """Aliases of a part explain that part only."""
    report = check_optimizer_coverage(model, sgd(list(model.enc.state_dict().values())))
    assert [finding.parameters for finding in report.findings] == [
        ("enc.weight", "enc.bias"),
        ("norm.weight", "norm.bias", "head.weight", "head.bias"),
    ]


def test_aliases_with_gradients_are_left_to_a_run(model, sgd):
    """A loop that hands the gradients over by hand may do so to any alias."""
    aliases = [p.data for p in model.parameters()]
    for alias in aliases:
        alias.grad = torch.zeros_like(alias)
    assert rules(check_optimizer_coverage(model, sgd(aliases))) == ([], ["not-judged"])


def test_aliases_of_another_copy_are_no_aliases(model, sgd):
    """The state_dict of a copy has the shapes, but not the memory."""
    optimizer = sgd(list(copy.deepcopy(model).state_dict().values()))
    assert rules(check_optimizer_coverage(model, optimizer)) == (["other-copy"], [])


@pytest.mark.parametrize("more", ["state_dict", "buffers"])
def test_aliases_and_buffers_beside_the_parameters_are_a_note(sgd, more):
    """With the Parameters themselves in an optimizer nothing is missing; what else it was given is named as such."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    extra = {"state_dict": list(model.state_dict().values()), "buffers": list(model.buffers())}[more]
    shapes = {"state_dict": "(3, 4), (3,), (3,), (3,), (3,), (3,), and 1 more", "buffers": "(3,), (3,), ()"}[more]
    report = check_optimizer_coverage(model, sgd([*model.parameters(), *extra]))
    assert str(report) == (
        "Optimizer coverage: passed, 1 note\n\nNotes:\n"
        f"[foreign-tensor] the optimizer holds {len(extra)} tensors that are buffers or aliases of the model's own "
        f"tensors, with requires_grad False and no gradient (shapes {shapes})\n"
        "  cause: it was given more than parameters, as model.buffers() and model.state_dict() hold; an optimizer "
        "leaves out what has no gradient\n"
        "  fix: give it model.parameters() only"
    )


def test_buffers_are_no_candidate_for_what_is_missing(sgd):
    """Beside missing parameters, buffers in the optimizer stay a note, and so does a lone one."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizers = {"main": sgd(model[0].parameters()), "buffer": sgd([model[1].running_mean])}
    report = check_optimizer_coverage(model, optimizers)
    assert rules(report) == (["uncovered-parameter"], ["foreign-tensor"])
    assert report.notes[0].seen == (
        "optimizer 'buffer' holds 1 tensor that is a buffer or an alias of the model's own tensors, with requires_grad "
        "False and no gradient (shape (3,))"
    )


def meta():
    return nn.Linear(4, 2, device="meta")


def fake():
    with FakeTensorMode():
        return nn.Linear(4, 2)


@pytest.mark.parametrize("make", [meta, fake])
def test_aliases_without_memory_are_judged_by_shape(sgd, make):
    """Meta and fake tensors have no memory to compare: the candidates stay open, and nothing warns."""
    model = make()
    assert check_optimizer_coverage(model, sgd(model.parameters())).ok
    (finding,) = check_optimizer_coverage(model, sgd(list(model.state_dict().values()))).findings
    assert finding.rule == "other-copy"
    assert finding.cause.startswith("undecided: ")


# Parameters that were wrapped anew


def test_parameters_wrapped_anew_for_the_optimizer_are_found(model, sgd):
    """A new Parameter around the old memory takes its own gradients, and whose mistake it is stays open."""
    report = check_optimizer_coverage(model, sgd([nn.Parameter(p.data) for p in model.parameters()]))
    assert str(report) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        f"[uncovered-parameter] 6 of 6 trainable parameters are in no optimizer: {EVERYTHING}; the optimizer holds 6 "
        "aliases of them instead (other tensors in the same memory, with requires_grad True and no gradient)\n"
        + WRAPPED_CAUSE
    )


def test_parameters_wrapped_anew_in_the_model_are_found(model, sgd):
    """So does one that was wrapped in the model, after the optimizer was built."""
    optimizer = sgd(model.parameters())
    model.head.weight = nn.Parameter(model.head.weight.data)
    report = check_optimizer_coverage(model, optimizer)
    assert rules(report) == (["uncovered-parameter"], [])
    assert report.findings[0].seen == (
        "1 of 6 trainable parameters is in no optimizer: head.weight; the optimizer holds 1 alias of it instead "
        "(another tensor in the same memory, with requires_grad True and no gradient)"
    )


def test_detached_and_wrapped_aliases_are_told_apart(model, sgd):
    """Each kind has a finding, since one cause is established and one is not."""
    aliases = [*model.enc.state_dict().values(), *(nn.Parameter(p.data) for p in model.head.parameters())]
    report = check_optimizer_coverage(model, sgd([*aliases, *model.norm.parameters()]))
    assert [(finding.rule, finding.parameters) for finding in report.findings] == [
        ("uncovered-parameter", ("enc.weight", "enc.bias")),
        ("uncovered-parameter", ("head.weight", "head.bias")),
    ]
    assert [finding.cause.startswith("undecided") for finding in report.findings] == [False, True]


# Flat buffers


def flatten(parameters, make=nn.Parameter):
    """Make parameters views of one flat tensor, as ZeRO and FSDP do, and return it."""
    parameters = list(parameters)
    flat = make(torch.cat([p.detach().flatten() for p in parameters]))
    start = 0
    for parameter in parameters:
        parameter.data = flat.data[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


@pytest.mark.parametrize("make", [nn.Parameter, torch.clone], ids=["leaf", "plain"])
def test_parameters_inside_of_a_flat_tensor_are_left_to_a_run(model, sgd, make):
    """The optimizer holds the flat tensor, whose views the parameters are: nothing is uncovered or foreign."""
    report = check_optimizer_coverage(model, sgd([flatten(model.parameters(), make)]))
    assert str(report) == (
        "Optimizer coverage: passed, 1 note\n\nNotes:\n"
        f"[not-judged] {EVERYTHING} are in no optimizer, but their memory lies inside of 1 tensor that the optimizer "
        "holds (shape (193,)), as with flat buffers: whether the gradients reach it can only be seen in a run"
    )
    assert report.notes[0].parameters == tuple(name for name, _ in model.named_parameters())


def test_a_flat_tensor_for_each_group_is_one_note(model):
    """Flat tensors for several groups and optimizers are counted and named together."""
    first, second = flatten(model.enc.parameters()), flatten([*model.norm.parameters(), *model.head.parameters()])
    optimizers = {"first": torch.optim.SGD([first], lr=0.1), "second": torch.optim.SGD([second], lr=0.1)}
    (note,) = check_optimizer_coverage(model, optimizers).notes
    assert note.seen == (
        f"{EVERYTHING} are in no optimizer, but their memory lies inside of 2 tensors that optimizers 'first', "
        "'second' hold (shapes (144,), (49,)), as with flat buffers: whether the gradients reach them can only be seen "
        "in a run"
    )


def test_what_is_outside_of_the_flat_tensor_is_uncovered(model, sgd):
    """A flat tensor of a part covers that part only, and is no candidate for the cause of the rest."""
    report = check_optimizer_coverage(model, sgd([flatten(model.enc.parameters()), *model.norm.parameters()]))
    assert rules(report) == (["uncovered-parameter"], ["not-judged"])
    assert report.findings[0].parameters == ("head.weight", "head.bias")
    assert report.notes[0].parameters == ("enc.weight", "enc.bias")


def test_a_flat_tensor_in_pieces_holds_what_lies_across_them(model, sgd):
    """Pieces of a flat tensor (one for each rank) are taken together."""
    flat = flatten(model.parameters(), torch.clone)
    pieces = [nn.Parameter(piece) for piece in flat.chunk(4)]
    assert rules(check_optimizer_coverage(model, sgd(pieces))) == ([], ["not-judged"])
    report = check_optimizer_coverage(model, sgd([*pieces[:2], pieces[3]]))
    assert report.findings[0].parameters == ("enc.weight", "enc.bias", "norm.weight")


def test_a_flat_copy_is_no_flat_buffer(model, sgd):
    """A vector of copied values shares no memory with the parameters."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().requires_grad_()
    report = check_optimizer_coverage(model, sgd([vector]))
    assert rules(report) == (["uncovered-parameter", "foreign-tensor"], [])


def test_views_between_the_columns_of_what_is_held(sgd):
    """Columns beside the held ones are not inside, however their addresses interleave; columns of them are."""
    model = nn.Linear(16, 4, bias=False)
    matrix = torch.zeros(4, 32)
    model.weight.data = matrix[:, 16:]
    beside, around = nn.Parameter(matrix[:, :16].detach()), nn.Parameter(matrix[:, 8:].detach())
    assert rules(check_optimizer_coverage(model, sgd([around]))) == ([], ["not-judged"])
    (finding,) = check_optimizer_coverage(model, sgd([beside])).findings
    assert finding.rule == "other-copy"


def test_views_too_large_to_mark_are_not_taken_for_flat_buffers(sgd, monkeypatch):
    """Views are compared byte by byte up to a size; above it nothing is claimed."""
    model = nn.Linear(16, 4, bias=False)
    matrix = torch.zeros(4, 32)
    model.weight.data = matrix[:, 16:]
    optimizer = sgd([nn.Parameter(matrix[:, 8:].detach())])
    monkeypatch.setattr("tl_coverage._spans.MAX_MARKED", 256)
    assert rules(check_optimizer_coverage(model, optimizer)) == (["uncovered-parameter", "foreign-tensor"], [])


def test_a_parameter_that_is_half_held_is_uncovered(sgd):
    """A part of the memory is not enough."""
    model = nn.Linear(8, 4, bias=False)
    report = check_optimizer_coverage(model, sgd([nn.Parameter(model.weight.data[:2])]))
    assert rules(report) == (["uncovered-parameter", "foreign-tensor"], [])


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "with gradients"])
def test_weight_norm_keeps_its_own_finding(model, sgd, trained):
    """weight_norm leaves one new parameter in the old one's memory: the parametrization is the cause."""
    optimizer = sgd(model.parameters())
    if trained:
        model.enc(torch.ones(2, 8)).sum().backward()
    nn.utils.parametrizations.weight_norm(model.enc)
    assert rules(check_optimizer_coverage(model, optimizer)) == (["replaced-layer"], [])


def test_a_flat_buffer_of_a_normed_model_is_left_to_a_run(model, sgd):
    """When all parameters of a parametrization are inside, memory explains them."""
    nn.utils.parametrizations.weight_norm(model.enc)
    assert rules(check_optimizer_coverage(model, sgd([flatten(model.parameters())]))) == ([], ["not-judged"])
