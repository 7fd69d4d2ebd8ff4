import pytest
from torch import nn

from tl_core import TrainingSetup
from tl_resume._check._ledger import Drawn, Ledger
from tl_resume._check._position import Position, describe_position


def ledger(drawn=None, inputs=None):
    """A ledger of written contents: by step, the sample indices of each batch, or (contents, indices)."""
    model = nn.Linear(1, 1)
    made = Ledger(TrainingSetup(model, {}))
    for step, batches in (drawn or {}).items():
        made.drawn[step] = tuple(
            one if isinstance(one, Drawn) else Drawn("setup.loader", str(one), one) for one in batches
        )
    for step, contents in (inputs or {}).items():
        made.inputs[step] = tuple(contents)
    return made


def in_order(steps, shift=0):
    """Batches of 4 samples, one a step, ``shift`` steps further on."""
    return {step: [tuple(range(4 * (step + shift), 4 * (step + shift) + 4))] for step in steps}


def inputs(steps, shift=0):
    return {step: [f"x{step + shift}"] for step in steps}


WHOLE = ledger(in_order(range(8)))
LATER = range(4, 8)


def test_the_same_batches():
    """Nothing is said where nothing differs."""
    assert describe_position(WHOLE, ledger(in_order(LATER)), 4) == Position("same", None, "", None)
    same = describe_position(ledger(inputs=inputs(range(8))), ledger(inputs=inputs(LATER)), 4)
    assert same == Position("same", None, "")


def test_nothing_seen():
    """A loop that is handed its batches and runs no model shows nothing."""
    assert describe_position(ledger(), ledger(), 4) == Position("unseen", None, "")


def test_data_that_start_again():
    """The first batches come again: which samples are repeated and which dropped is said."""
    assert describe_position(WHOLE, ledger(in_order(LATER, -4)), 4) == Position(
        "restarted",
        4,
        "step 4 trained on the batch that step 0 had without interruption: the data start again; "
        "sample indices 0-15 were repeated, sample indices 16-31 dropped",
        "setup.loader",
    )


def test_a_loader_in_the_place_of_another():
    """What a loader gives that was made to resume (accelerate's skip_first_batches) is held against the other's."""

    def made_anew(shift):
        return {
            step: [Drawn("DataLoader", str(one), one) for one in given]
            for step, given in in_order(LATER, shift).items()
        }

    assert describe_position(WHOLE, ledger(made_anew(0)), 4) == Position("same", None, "")
    assert describe_position(WHOLE, ledger(made_anew(-1)), 4) == Position(
        "behind",
        4,
        "step 4 trained on the batch that step 3 had without interruption: the data are 1 step behind; "
        "sample indices 12-15 were repeated, sample indices 28-31 dropped",
        "setup.loader",
    )


def test_data_that_are_behind():
    """One batch comes twice."""
    assert describe_position(WHOLE, ledger(in_order(LATER, -1)), 4) == Position(
        "behind",
        4,
        "step 4 trained on the batch that step 3 had without interruption: the data are 1 step behind; "
        "sample indices 12-15 were repeated, sample indices 28-31 dropped",
        "setup.loader",
    )


def test_data_that_are_ahead():
    """Batches are left out; samples beyond the end of the other run are not called repeated."""
    assert describe_position(WHOLE, ledger(in_order(LATER, 1)), 4) == Position(
        "ahead",
        4,
        "the batch of step 4 was skipped: step 4 trained on the batch that step 5 had without interruption; "
        "sample indices 16-19 dropped",
        "setup.loader",
    )
    assert describe_position(WHOLE, ledger(in_order(LATER, 2)), 4).seen == (
        "the batches of steps 4-5 were skipped: step 4 trained on the batch that step 6 had without interruption; "
        "sample indices 16-23 dropped"
    )


def test_inputs_alone():
    """A loop that draws without a DataLoader is seen by what its model is run on."""
    whole = ledger(inputs=inputs(range(8)))
    kinds = {shift: describe_position(whole, ledger(inputs=inputs(LATER, shift)), 4) for shift in (-4, -2, 1, 2, 100)}
    had = "step 4 trained on the inputs that step {} had without interruption"
    assert kinds == {
        -4: Position("restarted", 4, f"{had.format(0)}: the data start again"),
        -2: Position("behind", 4, f"{had.format(2)}: the data are 2 steps behind"),
        1: Position("ahead", 4, f"the inputs of step 4 were skipped: {had.format(5)}"),
        2: Position("ahead", 4, f"the inputs of steps 4-5 were skipped: {had.format(6)}"),
        100: Position("other", 4, "the inputs of step 4 are none that the uninterrupted run had"),
    }


def test_another_shuffle():
    """Batches of other samples are none that the other run had; the samples are compared all the same."""
    shuffled = {4: [(16, 20)], 5: [(17, 21)]}
    assert describe_position(ledger({4: [(16, 17)], 5: [(20, 21)]}), ledger(shuffled), 4) == Position(
        "other",
        4,
        "the batch of step 4 is none that the uninterrupted run had; the samples are the same in another order",
        "setup.loader",
    )
    repeated = ledger({4: [(0, 2, 4, 6, 8, 10, 12, 14)]})
    seen = describe_position(ledger({0: [tuple(range(15))], 4: [(50, 51)]}), repeated, 4).seen
    assert seen == (
        "the batch of step 4 is none that the uninterrupted run had; "
        "sample indices 0, 2, 4, 6, 8, 10 and 2 more were repeated, sample indices 50-51 dropped"
    )
    one = describe_position(ledger({0: [(0,)], 4: [(5,)]}), ledger({4: [(0,)]}), 4).seen
    assert one.endswith("; sample index 0 was repeated, sample index 5 dropped")


def test_the_same_samples_with_other_contents():
    """Augmentation that draws other random numbers is told from another position."""
    changed = ledger({4: [Drawn("setup.loader", "augmented", (16, 17, 18, 19))]})
    assert describe_position(ledger(in_order(range(5))), changed, 4) == Position(
        "contents",
        4,
        "step 4 drew the same samples as without interruption (sample indices 16-19), with other contents",
        "setup.loader",
    )


def test_another_order_within_a_step():
    """Micro-batches that swap places are in their own step still."""
    whole, swapped = ledger(inputs={4: ["a", "b"]}), ledger(inputs={4: ["b", "a"]})
    assert describe_position(whole, swapped, 4) == Position(
        "reordered", 4, "the inputs of step 4 came in another order"
    )


@pytest.mark.parametrize("seen_inputs", [False, True])
def test_batches_that_are_passed_over_do_not_count(seen_inputs):
    """A loop may draw its way to the position; its last draws are its batches."""
    drawn = in_order(LATER)
    drawn[4] = [*(batch for batches in in_order(range(4)).values() for batch in batches), *drawn[4]]
    whole = ledger(in_order(range(8)), inputs(range(8)) if seen_inputs else None)
    resumed = ledger(drawn, inputs(LATER) if seen_inputs else None)
    assert describe_position(whole, resumed, 4).kind == "same"


def test_more_or_fewer():
    """A step that draws nothing any more, or runs its model once more, is said to."""
    assert describe_position(WHOLE, ledger({4: [(16, 17, 18, 19)], 5: []}), 4) == Position(
        "count", 5, "step 5 drew no batches, without interruption 1 batch", "setup.loader"
    )
    more = ledger(inputs={4: ["x4", "again"], 5: ["x5"], 6: ["x6"], 7: ["x7"]})
    assert describe_position(ledger(inputs=inputs(range(8))), more, 4) == Position(
        "count", 4, "step 4 ran the models on 2 inputs, without interruption 1 input"
    )


def test_labels_count_where_inputs_agree():
    """The same inputs with other labels are other batches; a batch that is only drawn is none."""
    whole = ledger(in_order(range(8)), inputs(range(8)))
    resumed = ledger(in_order(LATER, -4), inputs(LATER))
    assert describe_position(whole, resumed, 4).kind == "restarted"
    resumed = ledger(in_order(range(4, 9)), inputs(LATER))
    assert describe_position(whole, resumed, 4) == Position("same", None, "")


def test_inputs_that_differ_before_the_batches():
    """What differs first is said; loaders explain inputs that differ in the same step."""
    whole = ledger(in_order(range(8)), inputs(range(8)))
    late = {**in_order([4, 5]), **in_order([6, 7], -4)}
    first = describe_position(whole, ledger(late, inputs(LATER, 50)), 4)
    assert first == Position("other", 4, "the inputs of step 4 are none that the uninterrupted run had")
    together = describe_position(whole, ledger(in_order(LATER, -4), inputs(LATER, 50)), 4)
    assert (together.kind, together.loader) == ("restarted", "setup.loader")
    assert describe_position(whole, ledger(in_order(LATER), inputs(LATER, 50)), 4) == first


def test_batches_that_come_again_every_epoch():
    """Of several places with the same batch, the one that agrees longest is where the data are."""
    order = ["a", "b", "c", "d", "a", "c", "b", "d"]
    whole = ledger(inputs={step: [content] for step, content in enumerate(order)})
    resumed = ledger(inputs={5: ["a"], 6: ["c"], 7: ["b"]})
    assert describe_position(whole, resumed, 5) == Position(
        "behind",
        5,
        "step 5 trained on the inputs that step 4 had without interruption: the data are 1 step behind",
    )


def test_inputs_made_from_weights_do_not_hide_the_position():
    """In a GAN the real batches show the position, whatever the generated ones are."""
    whole = ledger(inputs={step: [f"real{step}", f"fake{step}"] for step in range(8)})
    resumed = ledger(inputs={step: [f"real{step - 4}", f"other{step}"] for step in LATER})
    assert describe_position(whole, resumed, 4).kind == "restarted"


def test_a_loader_that_only_one_run_used():
    """A loader that the resumed run does not draw from any more is named."""
    whole = ledger({4: [(1,), Drawn("setup.memory", "m", None)]})
    assert describe_position(whole, ledger({4: [(1,)]}), 4) == Position(
        "count", 4, "step 4 drew no batches, without interruption 1 batch", "setup.memory"
    )
