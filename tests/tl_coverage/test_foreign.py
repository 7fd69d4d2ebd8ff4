from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tl_coverage import check_optimizer_coverage

COPY_FIX = (
    "build the optimizer from the parameters of the model that is trained, after its last copy; if it is called with "
    "these tensors on purpose, name its own parameters in ignore="
)
CALLED = "called with in place of its own parameters (torch.func.functional_call)"
REPLACED_FIX = (
    "build the optimizer after the last change to the model, or add the new parameters with add_param_group()"
)
UNDECIDED = (
    "undecided: what it holds belongs to something that is trained beside the model (a criterion with parameters), "
    "or to a part of the model that was replaced after the optimizer was built"
)


def rules(report):
    return [finding.rule for finding in report.findings], [note.rule for note in report.notes]


# Another copy


def test_an_optimizer_of_another_copy_is_found(model, sgd):
    """An optimizer built before a deepcopy holds the parameters of the original."""
    optimizer = sgd(model.parameters())
    assert str(check_optimizer_coverage(copy.deepcopy(model), optimizer)) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[other-copy] the optimizer holds none of the model's 6 trainable parameters, but 6 other tensors, of which 6 "
        "have the shape of a missing parameter; in no optimizer: enc.* (2 tensors), norm.* (2 tensors), "
        "head.* (2 tensors)\n"
        "  cause: the optimizer was built for another copy of the model (before a deepcopy, before the "
        "model was built again, or before load_state_dict(assign=True) put new Parameters in)\n"
        f"  fix: {COPY_FIX}"
    )


def test_optimizers_of_another_copy_are_seen_together(model, sgd):
    """One optimizer a parameter, all of them of another copy, are one finding."""
    optimizers = {name: sgd([p]) for name, p in model.head.named_parameters()}
    report = check_optimizer_coverage(copy.deepcopy(model).head, optimizers)
    assert rules(report) == (["other-copy"], [])
    assert report.findings[0].cause.startswith("optimizers 'weight', 'bias' were built for")


def test_plain_tensors_of_the_shapes_leave_the_cause_open(model, sgd):
    """Tensors that are no Parameters may be what the model is called with."""
    optimizer = sgd([p.detach().clone().requires_grad_() for p in model.parameters()])
    finding = check_optimizer_coverage(model, optimizer).findings[0]
    assert finding.rule == "other-copy"
    assert finding.cause == (
        "undecided: the optimizer was built for another copy of the model (before a deepcopy, before the model was "
        "built again, or before load_state_dict(assign=True) put new Parameters in), or for tensors that the model "
        f"is {CALLED}"
    )


def test_a_copy_of_one_part_is_found(sgd):
    """Of two networks with an optimizer each, the one whose optimizer holds strangers is named."""
    model = nn.ModuleDict({"gen": nn.Linear(4, 4), "disc": nn.Linear(4, 1)})
    optimizers = {"gen": sgd(copy.deepcopy(model["gen"]).parameters()), "disc": sgd(model["disc"].parameters())}
    assert str(check_optimizer_coverage(model, optimizers).findings[0]) == (
        "[other-copy] optimizer 'gen' holds none of the model's own parameters, but 2 other tensors, of which 2 have "
        "the shape of a missing parameter; in no optimizer: gen.* (2 tensors)\n"
        "  cause: optimizer 'gen' was built for another copy of this part of the model, before it was replaced\n"
        f"  fix: {COPY_FIX}"
    )


def test_a_copy_with_frozen_parts_is_one_finding(model, sgd):
    """The copy's tensors of what is frozen here belong to the copy too."""
    optimizer = sgd(model.parameters())
    model = copy.deepcopy(model)
    model.enc.requires_grad_(False)
    report = check_optimizer_coverage(model, optimizer)
    assert rules(report) == (["other-copy"], [])
    assert "but 6 other tensors, of which 4 have" in report.findings[0].seen


def test_what_stands_beside_a_copy_is_a_note(model, sgd):
    """A criterion's tensor in the optimizer of a copy is not counted as the copy's."""
    optimizer = sgd([*model.parameters(), nn.Parameter(torch.zeros(7))])
    report = check_optimizer_coverage(copy.deepcopy(model), optimizer)
    assert rules(report) == (["other-copy"], ["foreign-tensor"])
    assert "but 6 other tensors, of which 6 have" in report.findings[0].seen


def test_a_lazy_copy_is_found(sgd):
    """Parameters without a shape yet are compared as such."""
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1))
    assert rules(check_optimizer_coverage(copy.deepcopy(model), sgd(model.parameters()))) == (["other-copy"], [])


def test_another_model_is_no_copy(model, sgd):
    """Without the same shapes there is no ground to speak of a copy."""
    report = check_optimizer_coverage(model, sgd(nn.Linear(3, 5).parameters()))
    assert rules(report) == (["uncovered-parameter", "foreign-tensor"], [])


def test_master_weights_are_left_to_a_run(model, sgd):
    """float32 copies of half-precision weights may be copied back by the loop: a note says what was not judged."""
    model = model.to(torch.bfloat16)
    report = check_optimizer_coverage(model, sgd([p.detach().float() for p in model.parameters()]))
    assert str(report) == (
        "Optimizer coverage: passed, 1 note\n\nNotes:\n"
        "[not-judged] enc.* (2 tensors), norm.* (2 tensors), head.* (2 tensors) are in no optimizer, but the optimizer "
        "holds float32 tensors of the same shapes: whether these are master weights that the loop copies back can only "
        "be seen in a run"
    )


# A replaced layer


def test_a_layer_that_was_replaced_is_found(model, sgd):
    """A new head, of another size, is in no optimizer; the old one still is."""
    optimizer = sgd(model.parameters())
    model.head = nn.Linear(16, 3)
    assert str(check_optimizer_coverage(model, optimizer)) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[replaced-layer] head.* (2 tensors) are in no optimizer (shapes (3, 16), (3,)); the optimizer holds 2 tensors "
        "instead that are no parameters of the model (shapes (1, 16), (1,))\n"
        "  cause: model.head was replaced after the optimizer was built, which still holds the old one\n"
        f"  fix: {REPLACED_FIX}"
    )


def test_a_layer_of_the_same_shape_is_found_in_any_group(model):
    """With the same shapes the old layer is known wherever it is held."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": vectors}, {"params": matrices}])
    model.enc = nn.Linear(8, 16)
    (finding,) = check_optimizer_coverage(model, optimizer).findings
    assert finding.seen == (
        "enc.* (2 tensors) are in no optimizer (shapes (16, 8), (16,)); the optimizer holds 2 tensors instead that are "
        "no parameters of the model (the same shapes)"
    )
    assert finding.rule == "replaced-layer"


def test_a_layer_replaced_by_several_is_found(model, sgd):
    """A linear head that became a small network takes the same input in the same place."""
    optimizer = sgd(model.parameters())
    model.head = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))
    report = check_optimizer_coverage(model, optimizer)
    assert rules(report) == (["replaced-layer"], [])
    assert len(report.findings[0].parameters) == 4


def test_a_parameter_that_was_replaced_between_others_is_found(model, sgd):
    """One new matrix counts when the old one stands between its neighbours."""
    optimizer = sgd(model.parameters())
    model.head.weight = nn.Parameter(torch.zeros(1, 16))
    (finding,) = check_optimizer_coverage(model, optimizer).findings
    assert (finding.rule, finding.parameters) == ("replaced-layer", ("head.weight",))


def test_tensors_out_of_the_order_of_the_model_are_no_replaced_layer(model):
    """Tensors after the parameters that follow the missing layer do not stand in its place."""
    own = [p for name, p in model.named_parameters() if not name.startswith("enc")]
    optimizer = torch.optim.SGD([*own, nn.Parameter(torch.zeros(5, 8)), nn.Parameter(torch.zeros(5))], lr=0.1)
    assert rules(check_optimizer_coverage(model, optimizer)) == (["uncovered-parameter", "foreign-tensor"], [])


def test_a_parametrization_that_was_left_out_is_uncovered(model, sgd):
    """Without a tensor that may be its old weight, a parametrization is missing like any layer."""
    nn.utils.parametrizations.weight_norm(model.enc)
    kept = [p for name, p in model.named_parameters() if "original" not in name]
    report = check_optimizer_coverage(model, sgd([*kept, nn.Parameter(torch.zeros(2))]))
    assert rules(report) == (["uncovered-parameter", "foreign-tensor"], [])


def test_names_in_the_optimizer_settle_it(model):
    """An optimizer built from named_parameters() knows what it holds, whatever the shapes are."""
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    model.head = nn.Linear(5, 3)
    assert rules(check_optimizer_coverage(model, optimizer)) == (["replaced-layer"], [])


@pytest.mark.parametrize("named", [False, True], ids=["plain", "named"])
def test_a_parametrization_after_the_optimizer_is_found(model, named):
    """weight_norm replaces a weight by two new parameters."""
    optimizer = torch.optim.SGD(model.named_parameters() if named else model.parameters(), lr=0.1)
    nn.utils.parametrizations.weight_norm(model.enc)
    assert str(check_optimizer_coverage(model, optimizer)) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[replaced-layer] enc.parametrizations.weight.original0, enc.parametrizations.weight.original1 are in no "
        "optimizer; the optimizer holds a tensor of shape (16, 8) instead, which is no parameter of the model\n"
        "  cause: enc.weight was parametrized (weight_norm or a parametrization) after the optimizer was built: new "
        "parameters took the place of the one that the optimizer holds\n"
        "  fix: apply the parametrization first, then build the optimizer"
    )


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_the_older_weight_norm_is_found(sgd):
    """So does the older weight_norm, here of a model that is one layer."""
    model = nn.Linear(8, 16)
    optimizer = sgd(model.parameters())
    nn.utils.weight_norm(model)
    (finding,) = check_optimizer_coverage(model, optimizer).findings
    assert finding.parameters == ("weight_g", "weight_v")
    assert finding.cause.startswith("weight was parametrized (weight_norm or a parametrization)")


@pytest.mark.parametrize(
    "change",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm],
    ids=["weight", "spectral"],
)
def test_a_parametrization_before_the_optimizer_is_left_alone(model, sgd, change):
    """Built in the right order, nothing is missing."""
    change(model.enc)
    assert str(check_optimizer_coverage(model, sgd(model.parameters()))) == "Optimizer coverage: passed"


def test_a_parametrization_that_keeps_the_parameter_is_left_alone(model, sgd):
    """spectral_norm keeps the Parameter object, so the order does not matter."""
    optimizer = sgd(model.parameters())
    nn.utils.parametrizations.spectral_norm(model.enc)
    assert check_optimizer_coverage(model, optimizer).ok


# Something beside the model


def test_a_learnable_criterion_is_a_note(model, sgd):
    """Tensors beside a fully covered model are worth a note only."""
    scale = nn.Parameter(torch.zeros(1))
    assert str(check_optimizer_coverage(model, sgd([*model.parameters(), scale]))) == (
        "Optimizer coverage: passed, 1 note\n\nNotes:\n"
        "[foreign-tensor] the optimizer holds 1 tensor that is no parameter of the model (shape (1,))\n"
        "  cause: it belongs to something that is trained beside the model, for example a criterion with parameters\n"
        "  fix: nothing, if that is meant; a run shows whether gradients reach what it holds"
    )


def test_a_criterion_with_its_own_optimizer_is_a_note(model, sgd):
    """So are the tensors of an optimizer of their own."""
    criterion = nn.Linear(3, 2)
    optimizers = {"main": sgd(model.parameters()), "criterion": torch.optim.SGD(criterion.named_parameters(), lr=0.1)}
    (note,) = check_optimizer_coverage(model, optimizers).notes
    assert note.seen == (
        "optimizer 'criterion' holds 2 tensors that are no parameters of the model "
        "(named weight, bias; shapes (2, 3), (2,))"
    )


def test_strangers_beside_missing_parameters_are_a_finding(model, sgd):
    """With parameters missing it is open which of two things happened, and the finding says so."""
    scale = nn.Parameter(torch.zeros(1))
    report = check_optimizer_coverage(model, sgd([*model.enc.parameters(), *model.norm.parameters(), scale]))
    assert rules(report) == (["uncovered-parameter", "foreign-tensor"], [])
    assert str(report.findings[1]) == (
        "[foreign-tensor] the optimizer holds 1 tensor that is no parameter of the model (shape (1,)), while "
        "head.* (2 tensors) are in no optimizer\n"
        f"  cause: {UNDECIDED}\n"
        "  fix: build the optimizer from the finished model's parameters, plus those of what is trained beside it"
    )


def stacked(members):
    params, _ = torch.func.stack_module_state(list(members))
    return params.values()


def test_tensors_that_the_model_may_be_called_with_leave_it_open(sgd):
    """With nothing of the model's own in an optimizer, a functional call (here of an ensemble) is a candidate too."""
    members = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))
    report = check_optimizer_coverage(members, sgd(stacked(members)))
    assert rules(report) == (["uncovered-parameter", "foreign-tensor"], [])
    assert str(report.findings[1]) == (
        "[foreign-tensor] the optimizer holds 2 tensors that are no parameters of the model (shapes (3, 1, 4), (3, 1))"
        ", while 0.* (2 tensors), 1.* (2 tensors), 2.* (2 tensors) are in no optimizer\n"
        "  cause: undecided: what it holds belongs to something that is trained beside the model (a criterion with "
        "parameters), to a part of the model that was replaced after the optimizer was built, or is what the model is "
        f"{CALLED}\n"
        "  fix: build the optimizer from the finished model's parameters, plus those of what is trained beside it"
    )


def test_a_template_whose_parameters_are_ignored_is_not_judged(sgd):
    """Named in ignore=, the model's own parameters leave nothing to judge, and the note leaves their use open."""
    members = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))
    report = check_optimizer_coverage(members, sgd(stacked(members)), ignore=["*"])
    assert str(report) == (
        "Optimizer coverage: could not judge\n\nNotes:\n"
        "[foreign-tensor] the optimizer holds 2 tensors that are no parameters of the model "
        "(shapes (3, 1, 4), (3, 1))\n"
        "  cause: undecided: they belong to something that is trained beside the model, for example a criterion with "
        f"parameters, or they are what the model is {CALLED}\n"
        "  fix: nothing, if that is meant; a run shows whether gradients reach what it holds\n\n"
        "[not-judged] all 6 parameters of the model are ignored: there is nothing that an optimizer has to update"
    )


def forget_bias(model):
    return [p for name, p in model.named_parameters() if name != "head.bias"], torch.zeros(1)


def forget_head(model):
    return [p for name, p in model.named_parameters() if not name.startswith("head")], torch.zeros(5, 16)


@pytest.mark.parametrize("forget", [forget_bias, forget_head])
def test_a_criterion_is_not_taken_for_a_replaced_layer(model, sgd, forget):
    """A tensor at the end that happens to fit what was forgotten proves nothing."""
    kept, tensor = forget(model)
    report = check_optimizer_coverage(model, sgd([*kept, nn.Parameter(tensor)]))
    assert rules(report) == (["uncovered-parameter", "foreign-tensor"], [])


def test_many_shapes_are_cut(model, sgd):
    """Six shapes are shown, the rest counted."""
    extra = [nn.Parameter(torch.zeros(size)) for size in range(1, 9)]
    (note,) = check_optimizer_coverage(model, sgd([*model.parameters(), *extra])).notes
    assert note.seen.endswith("(shapes (1,), (2,), (3,), (4,), (5,), (6,), and 2 more)")


def test_places_in_a_sequence_are_written_as_code(sgd):
    """A cause names `model[1]`, which can be typed, not `model.1`."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 10))
    optimizer = sgd(model.parameters())
    model[1] = nn.Linear(8, 3)
    (finding,) = check_optimizer_coverage(model, optimizer).findings
    assert finding.cause == "model[1] was replaced after the optimizer was built, which still holds the old one"
