from __future__ import annotations

import pytest
import torch

from tl_coverage import check_optimizer_coverage


def split(model, no_decay, decay=0.1):
    """Build AdamW with a group without decay for the names that hold any of these words."""
    bare = [p for name, p in model.named_parameters() if any(word in name for word in no_decay)]
    rest = [p for name, p in model.named_parameters() if not any(word in name for word in no_decay)]
    return torch.optim.AdamW([{"params": rest, "weight_decay": decay}, {"params": bare, "weight_decay": 0.0}])


def test_decay_that_reaches_too_far_is_found(model):
    """A name filter that misses a parameter shows in the group's weight decay."""
    optimizer = split(model, ["bias", "LayerNorm.weight"])
    report = check_optimizer_coverage(model, optimizer, no_decay=["*.bias", "norm.*"])
    assert str(report) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[decayed-parameter] norm.weight matches no_decay, but group 0 of the optimizer decays it "
        "with weight_decay=0.1\n"
        "  cause: there is a group without weight decay, but this parameter was not sorted into it\n"
        "  fix: move them to a group with weight_decay=0.0, chosen by the names that model.named_parameters() gives"
    )
    assert report.findings[0].evidence == {"optimizer": "optimizer", "group": 0, "weight_decay": 0.1}


def test_decay_of_everything_is_found(model):
    """A single group decays everything, and the cause says so."""
    optimizers = {"main": torch.optim.AdamW(model.parameters(), weight_decay=0.01)}
    (finding,) = check_optimizer_coverage(model, optimizers, no_decay=["*.bias"]).findings
    assert finding.seen == (
        "enc.bias, norm.bias, head.bias match no_decay, but group 0 of the optimizer decays them with weight_decay=0.01"
    )
    assert finding.cause == "every group has weight decay: none was made for the parameters without"


def test_decay_as_wanted_is_left_alone(model):
    """Patterns and groups that agree pass, without decay anywhere too; without no_decay nothing is judged."""
    optimizer = split(model, ["bias", "norm"])
    assert (
        str(check_optimizer_coverage(model, optimizer, no_decay=["*.bias", "norm.*"])) == "Optimizer coverage: passed"
    )
    assert str(check_optimizer_coverage(model, optimizer)) == "Optimizer coverage: passed"
    bare = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    assert str(check_optimizer_coverage(model, bare, no_decay=["norm.*"])) == "Optimizer coverage: passed"


def test_parameters_without_decay_that_no_pattern_names_are_noted(model):
    """Where others decay, an undecayed parameter that matches no pattern is worth a note."""
    optimizer = split(model, ["bias", "norm", "head"])
    report = check_optimizer_coverage(model, optimizer, no_decay=["*.bias", "norm.*"])
    assert str(report) == (
        "Optimizer coverage: passed, 1 note\n\nNotes:\n"
        "[undecayed-parameter] head.weight matches no pattern of no_decay, but group 1 of the optimizer does not "
        "decay it\n"
        "  cause: it is in a group with weight_decay=0\n"
        "  fix: move them to a group with weight decay, or add their names to no_decay"
    )


def test_frozen_and_ignored_parameters_do_not_decay(model):
    """Decay moves only what the optimizer updates."""
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm.requires_grad_(False)
    assert check_optimizer_coverage(model, optimizer, no_decay=["norm.*"]).ok
    assert check_optimizer_coverage(model, optimizer, no_decay=["*.bias"], ignore=["*.bias"]).ok


def test_a_tensor_may_be_the_decay(model):
    """weight_decay may be a tensor, as a learned or scheduled one is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.5)
    (finding,) = check_optimizer_coverage(model, optimizer, no_decay=["norm.bias"]).findings
    assert finding.seen.endswith("decays it with weight_decay=0.5")


def test_an_optimizer_without_the_setting_cannot_be_judged(model):
    """LBFGS has no weight_decay: no_decay= is said to be unjudged, the rest passes."""
    report = check_optimizer_coverage(model, torch.optim.LBFGS(model.parameters()), no_decay=["*.bias"])
    assert str(report) == (
        "Optimizer coverage: passed, 1 note\n\nNotes:\n"
        "[not-judged] no group of the optimizer has the setting weight_decay: no_decay= could not be judged"
    )


@pytest.mark.parametrize(
    ("no_decay", "error", "message"),
    [
        ("*.bias", TypeError, "no_decay must be a list of patterns, got the string '*.bias': write ['*.bias']"),
        (
            ["LayerNorm.*"],
            ValueError,
            "no_decay: the pattern 'LayerNorm.*' matches nothing; names are for example "
            "enc.weight, enc.bias, norm.weight, norm.bias, head.weight",
        ),
    ],
    ids=["string", "no match"],
)
def test_bad_patterns_are_refused(model, no_decay, error, message):
    """A string, or a pattern that matches no parameter, is an error."""
    with pytest.raises(error) as caught:
        check_optimizer_coverage(model, torch.optim.AdamW(model.parameters()), no_decay=no_decay)
    assert str(caught.value) == message
