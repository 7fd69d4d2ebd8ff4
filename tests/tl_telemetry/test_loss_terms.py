from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tl_core import TrainingSetup
from tl_telemetry import Backward, observe

SCALE = 8.0


def build():
    model = nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    scaler.scale(torch.ones(()))  # the scale exists from the first call on
    return setup


def loss_of(setup):
    return nn.functional.mse_loss(setup.model(torch.ones(2, 3)), torch.zeros(2, 1))


def penalty_of(setup):
    return setup.model.weight.pow(2).sum()


def backward_of(run_backward, setup=None, steps=1):
    """Return the last recorded backward pass of a loop."""
    setup = build() if setup is None else setup
    with observe(setup) as run:
        for _ in range(steps):
            with run.step():
                run_backward(setup)
    return [event for event in run.records[-1].events if isinstance(event, Backward)][-1]


def read(term):
    factors = tuple(factor if isinstance(factor, float) else factor.value() for factor in term.factors)
    return term.name.removesuffix("Backward0"), term.scaler, factors, term.known


LOSSES = {
    "scaled": (lambda s: s.scaler.scale(loss_of(s)), [("MseLoss", "scaler", (), True)]),
    "not scaled": (lambda s: loss_of(s), [("MseLoss", None, (), True)]),
    "divided afterwards": (lambda s: s.scaler.scale(loss_of(s)) / 4, [("MseLoss", "scaler", (0.25,), True)]),
    "divided before": (lambda s: s.scaler.scale(loss_of(s) / 4), [("MseLoss", "scaler", (0.25,), True)]),
    "divided by the number of tokens where there are none": (
        lambda s: loss_of(s) / torch.tensor(0.0),
        [("MseLoss", None, (math.inf,), True)],
    ),
    "scaled sum": (
        lambda s: s.scaler.scale(loss_of(s)) + s.scaler.scale(penalty_of(s)),
        [("MseLoss", "scaler", (), True), ("Sum", "scaler", (), True)],
    ),
    "one term of a sum": (
        lambda s: s.scaler.scale(loss_of(s)) + 0.1 * penalty_of(s),
        [("MseLoss", "scaler", (), True), ("Sum", None, (pytest.approx(0.1),), True)],
    ),
    "stacked": (
        lambda s: torch.stack([s.scaler.scale(loss_of(s)), penalty_of(s)]).sum(),
        [("MseLoss", "scaler", (), True), ("Sum", None, (), True)],
    ),
    "losses of each example": (
        lambda s: s.scaler.scale(s.model(torch.ones(2, 3)).squeeze(1)).mean(),
        [("Mean", "scaler", (), True)],
    ),
    "by its number": (lambda s: loss_of(s) * s.scaler.get_scale(), [("MseLoss", None, (SCALE,), True)]),
    "by a tensor": (lambda s: torch.tensor(3.0) * loss_of(s), [("MseLoss", None, (3.0,), True)]),
    "checkpointed": (
        lambda s: s.scaler.scale(
            nn.functional.mse_loss(checkpoint(s.model, torch.ones(2, 3), use_reentrant=False), torch.zeros(2, 1))
        ),
        [("MseLoss", "scaler", (), True)],
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_terms_of_a_loss_are_known_with_what_multiplies_them(name):
    """A scale is recognised by where it lies in memory, wherever in the graph of the root it is."""
    loss, expected = LOSSES[name]
    backward = backward_of(lambda setup: loss(setup).backward())
    assert [read(term) for term in backward.terms] == expected


def test_a_list_of_scaled_losses_has_a_term_each():
    """Several roots are one pass with all their terms; scale([...]) copies the scale, which is then a plain factor."""
    backward = backward_of(lambda s: torch.autograd.backward(s.scaler.scale([loss_of(s), penalty_of(s)])))
    assert [read(term) for term in backward.terms] == [
        ("MseLoss", None, (SCALE,), True),
        ("Sum", None, (SCALE,), True),
    ]


def test_saved_tensors_with_hooks_are_left_alone():
    """What somebody's hook would have to unpack is not read: such a term is not known."""
    unpacked = []

    def run_backward(setup):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):
            loss = setup.scaler.scale(loss_of(setup))
        loss.backward()

    backward = backward_of(run_backward)
    assert [read(term) for term in backward.terms] == [("MseLoss", None, (), False)]
    unwatched = len(unpacked)
    unpacked.clear()
    run_backward(build())
    assert len(unpacked) == unwatched


def test_a_graph_whose_tensors_are_freed_raises_torchs_error_and_no_other():
    """A second backward pass through a freed graph fails as it does without an observer."""

    def twice(setup):
        loss = setup.scaler.scale(loss_of(setup))
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    assert backward_of(twice).number == 2


def test_compiled_code_may_hide_a_scale():
    """A root that compiled code made could be scaled inside: its term is not known."""

    def run_backward(setup):
        torch.compile(lambda: loss_of(setup) * 2.0, backend="aot_eager")().backward()

    assert [read(term)[3] for term in backward_of(run_backward).terms] == [False]


def test_a_gradient_that_is_given_is_a_figure():
    """backward(gradient=scale) scales too; without an argument the figure is 1."""
    given = backward_of(lambda s: loss_of(s).backward(gradient=torch.tensor(SCALE)))
    assert (given.gradient.value(), backward_of(lambda s: loss_of(s).backward()).gradient.value()) == (SCALE, 1.0)


def test_what_the_first_steps_found_holds_in_later_ones():
    """Graphs are searched in the first steps; a term of the same line stays known afterwards, another one does not."""
    assert read(backward_of(lambda s: loss_of(s).backward(), steps=12).terms[0])[3]
    calls = []

    def changes(setup):
        calls.append(None)
        (loss_of(setup) if len(calls) < 12 else penalty_of(setup)).backward()

    assert not read(backward_of(changes, steps=12).terms[0])[3]


@pytest.mark.parametrize(
    ("loss", "root", "own"),
    [
        (lambda s: s.scaler.scale(loss_of(s).half()), torch.float32, torch.float16),
        (lambda s: loss_of(s).bfloat16() / 2, torch.bfloat16, torch.bfloat16),
        (lambda s: loss_of(s).bfloat16().float() / 2, torch.float32, torch.bfloat16),
        (lambda s: s.scaler.scale(loss_of(s)), torch.float32, torch.float32),
    ],
)
def test_the_dtypes_of_a_root_and_of_its_loss_are_known(loss, root, own):
    """A float16 loss times a float32 scale is a float32 root; the loss itself is told."""
    backward = backward_of(lambda setup: loss(setup).backward())
    assert (backward.dtype, backward.terms[0].dtype) == (root, own)


def test_a_static_scale_is_seen_without_a_scaler():
    """A number that multiplies the loss is a factor of its term; a plain loss has no terms to speak of."""
    setup = build()
    setup.scaler = None
    (term,) = backward_of(lambda s: (loss_of(s) * 1024).backward(), setup).terms
    assert read(term) == ("MseLoss", None, (1024.0,), True)
    assert backward_of(lambda s: loss_of(s).backward(), setup).terms is None


@pytest.mark.parametrize(("factor", "known"), [(1024, True), (torch.tensor(64.0), True), (2, False), (1, False)])
def test_norms_after_a_pass_are_kept_where_a_scale_may_be_undone_by_hand(factor, known):
    """Without a scaler, a large number that multiplies the loss may be a scale; a small one is none."""
    setup = build()
    setup.scaler = None
    backward = backward_of(lambda s: (loss_of(s) * factor).backward(), setup)
    assert (backward.norms is not None) == known
    if known:
        grads = [p.grad for p in setup.model.parameters()]
        assert backward.norms.values() == pytest.approx([float(grad.norm()) for grad in grads])


def test_autocast_is_known_where_a_backward_pass_followed():
    """The dtype of autocast around a forward pass is kept if gradients came of it, and not after an evaluation."""

    def train(setup, dtype):
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(setup)
        loss.backward()

    def evaluate(setup):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            setup.model(torch.ones(2, 3))
        loss_of(setup).backward()

    for loop, expected in ((lambda s: train(s, torch.bfloat16), {torch.bfloat16}), (evaluate, set())):
        setup = build()
        with observe(setup) as run, run.step():
            loop(setup)
        assert run.facts.recorder.forward.autocast == expected
