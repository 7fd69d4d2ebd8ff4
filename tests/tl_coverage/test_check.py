from __future__ import annotations

import pytest
import torch
from torch import nn

from tl_core import CheckFailed, NotJudged
from tl_coverage import assert_optimizer_coverage, check_optimizer_coverage


def test_a_covered_model_passes(model, sgd):
    """Every trainable parameter in one optimizer: the report passes and is returned."""
    report = assert_optimizer_coverage(model, sgd(model.parameters()))
    assert str(report) == "Optimizer coverage: passed"
    assert report.ok


def test_a_finding_is_raised_by_the_assertion(model, sgd):
    """assert_ raises what check_ reports."""
    optimizer = sgd(model.enc.parameters())
    with pytest.raises(CheckFailed) as caught:
        assert_optimizer_coverage(model, optimizer)
    assert str(caught.value) == str(check_optimizer_coverage(model, optimizer))


def test_the_report_is_carried_by_what_is_raised(model, sgd):
    """CheckFailed and NotJudged are assertions that hold the report, so that a caller can look at the findings."""
    with pytest.raises(AssertionError) as failed:
        assert_optimizer_coverage(model, sgd(model.enc.parameters()))
    assert [finding.rule for finding in failed.value.report.findings] == ["uncovered-parameter"]
    with pytest.raises(AssertionError) as unjudged:
        assert_optimizer_coverage(model, sgd(model.parameters()), ignore=["*"])
    assert not unjudged.value.report.judged


class Own:
    """An optimizer that is none of torch's, with groups of parameters and no more."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]

    def step(self):
        """Move nothing."""

    def zero_grad(self):
        """Clear nothing."""


def test_any_optimizer_with_groups_is_read(model):
    """An optimizer needs no class of torch's; a tuple or generator of patterns will do."""
    assert check_optimizer_coverage(model, Own(model.parameters()), no_decay=()).ok
    report = check_optimizer_coverage(model, Own(model.enc.parameters()), ignore=(name for name in ["norm.*"]))
    assert report.findings[0].parameters == ("head.weight", "head.bias")


def test_optimizers_of_a_list_are_named_by_place(model, sgd):
    """Those of a list are optimizer[0], optimizer[1], ... in every message."""
    report = check_optimizer_coverage(model, [sgd(model.parameters()), sgd(model.head.parameters())])
    assert report.findings[0].seen == (
        "2 parameters are in 2 optimizers ('optimizer[0]', 'optimizer[1]'): head.* (2 tensors)"
    )


def test_the_most_telling_finding_comes_first(model):
    """Where several rules speak, what is missing comes before what is listed twice and what decays."""
    optimizer = torch.optim.AdamW([model.enc.weight, model.head.weight])
    optimizer.param_groups[0]["params"].append(model.head.weight)
    model.norm.requires_grad_(False)
    report = check_optimizer_coverage(model, optimizer, allow_frozen=False, no_decay=["head.*"])
    assert [finding.rule for finding in report.findings] == [
        "uncovered-parameter",
        "listed-twice",
        "frozen-parameter",
        "decayed-parameter",
    ]


def test_the_options_reach_the_check(model, sgd):
    """assert_ takes the options of check_."""
    optimizer = torch.optim.AdamW(model.enc.parameters())
    model.head.requires_grad_(False)
    assert_optimizer_coverage(model, optimizer, ignore=["norm.*"])
    for options in ({"allow_frozen": False}, {"no_decay": ["enc.bias"]}):
        with pytest.raises(CheckFailed):
            assert_optimizer_coverage(model, optimizer, ignore=["norm.*"], **options)


def test_a_model_without_trainable_parameters_is_not_judged(model, sgd):
    """Nothing to look at is no pass."""
    optimizer = sgd(model.parameters())
    ignored = check_optimizer_coverage(model, optimizer, ignore=["*"])
    assert str(ignored) == (
        "Optimizer coverage: could not judge\n\nNotes:\n"
        "[not-judged] all 6 parameters of the model are ignored: there is nothing that an optimizer has to update"
    )
    model.requires_grad_(False)
    with pytest.raises(NotJudged) as caught:
        assert_optimizer_coverage(model, optimizer)
    assert str(caught.value) == (
        "Optimizer coverage: could not judge\n\nNotes:\n"
        "[not-judged] none of the 6 parameters of the model is trainable: "
        "there is nothing that an optimizer has to update"
    )
    bare = check_optimizer_coverage(nn.ReLU(), {})
    assert bare.notes[0].seen == ("the model has no parameters: there is nothing that an optimizer has to update")


def test_a_tied_parameter_is_named_by_any_of_its_names(sgd):
    """Patterns match all names of tied weights; the message has the first."""
    model = nn.ModuleDict({"emb": nn.Embedding(4, 2), "out": nn.Linear(2, 4, bias=False)})
    model["out"].weight = model["emb"].weight
    optimizer = sgd([nn.Parameter(torch.zeros(5, 5))])
    assert check_optimizer_coverage(model, optimizer).findings[0].parameters == ("emb.weight",)
    assert check_optimizer_coverage(model, optimizer, ignore=["out.*"]).findings == ()


def complex_model():
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    return model


def lazy_model():
    return nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1))


def sparse_model():
    return nn.Embedding(10, 4, sparse=True)


@pytest.mark.parametrize("make", [complex_model, lazy_model, sparse_model])
def test_unusual_parameters_pass(make, sgd):
    """Complex, lazy and sparsely updated parameters are parameters like others."""
    model = make()
    assert str(check_optimizer_coverage(model, sgd(model.parameters()), no_decay=["*"])) == "Optimizer coverage: passed"


def test_nothing_is_changed(model, sgd):
    """Neither the model, the optimizer nor the generators are touched, and no parametrization is evaluated."""
    nn.utils.parametrizations.spectral_norm(model.enc)
    optimizer = sgd(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    assert check_optimizer_coverage(model, optimizer, allow_frozen=False).ok
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not optimizer.state


NEEDS = "must be an optimizer (with step, zero_grad and param_groups), got"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (lambda m, o: (o, m), {}, TypeError, "model and optimizers are swapped: the model comes first"),
        (lambda m, o: (m, None), {}, TypeError, f"optimizer {NEEDS} None"),
        (lambda m, o: (m, m), {}, TypeError, f"optimizer {NEEDS} a Net"),
        (lambda m, o: (m, []), {}, ValueError, "optimizers is an empty list; pass at least one optimizer"),
        (
            lambda m, o: (m, [o, o]),
            {},
            ValueError,
            "optimizers holds the same SGD twice, as 'optimizer[0]' and 'optimizer[1]'",
        ),
        (
            lambda m, o: (m, o),
            {"ignore": "enc.*"},
            TypeError,
            "ignore must be a list of patterns, got the string 'enc.*': write ['enc.*']",
        ),
        (
            lambda m, o: (m, o),
            {"ignore": ["encoder.*"]},
            ValueError,
            "ignore: the pattern 'encoder.*' matches nothing; names are for example "
            "enc.weight, enc.bias, norm.weight, norm.bias, head.weight",
        ),
        (
            lambda m, o: (m, o),
            {"ignore": None},
            TypeError,
            "ignore must be a list of patterns, got NoneType",
        ),
        (
            lambda m, o: (m, o),
            {"ignore": [3]},
            TypeError,
            "ignore must hold strings, got int 3",
        ),
        (
            lambda m, o: (m, o),
            {"allow_frozen": "no"},
            TypeError,
            "allow_frozen must be True or False, got str 'no'",
        ),
    ],
    ids=["swapped", "none", "model", "empty", "twice", "string", "no match", "no list", "no strings", "flag"],
)
def test_bad_arguments_are_refused(model, sgd, arguments, options, error, message):
    """The error names the argument, what was got and what is allowed."""
    with pytest.raises(error) as caught:
        check_optimizer_coverage(*arguments(model, sgd(model.parameters())), **options)
    assert str(caught.value) == message
