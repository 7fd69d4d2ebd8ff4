from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque
from textwrap import dedent

import numpy as np
import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume import diff_states, training_state


def make_setup():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.encoder = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4))
    model.head = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    setup = TrainingSetup(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    setup.model(torch.ones(3, 2)).sum().backward()
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return setup


def text(block):
    return dedent(block).strip("\n")


def test_equal_states():
    """Two captured states that hold the same."""
    setup = make_setup()
    state = training_state(setup)
    diff = diff_states(state, copy.deepcopy(state))
    tensors = diff.num_tensors
    assert (diff.same, diff.differences, diff.only_in_a, diff.only_in_b, diff.unreadable) == (True, (), (), (), ())
    assert str(diff) == f"same: {tensors} tensors, {diff.num_values} plain values\n  a: a\n  b: b"


def test_one_weight_differs():
    """One element of one weight, in the text: how many, how much, where."""
    a = {"model": {"encoder.weight": torch.ones(2, 3), "head.weight": torch.ones(3)}, "epoch": 3}
    b = copy.deepcopy(a)
    b["model"]["encoder.weight"][1, 2] = 1.25
    diff = diff_states(a, b)
    assert not diff.same
    assert str(diff) == text("""
        different: 1 of 2 tensors
          a: a
          b: b

        model
          elements  largest  relative  tensor
            1 of 6     0.25       0.2  encoder.weight
                                         [1, 2]: 1 -> 1.25
    """)
    assert str(diff.differences[0]) == (
        "model: encoder.weight: 1 of 6 elements differ, by up to 0.25; [1, 2]: 1 -> 1.25"
    )


def test_optimizer_state_is_named_by_parameter():
    """A captured setup and a live one, which made one more step: by parameter, schedule and attribute."""
    setup = make_setup()
    setup.bad_epochs = 3
    setup.state["ema"] = {"decay": 0.9, "shadow": torch.zeros(2)}
    before = copy.deepcopy(training_state(setup))
    setup.optimizer.state[setup.model.head.bias]["exp_avg"] += 1.0
    setup.scheduler.last_epoch += 1
    setup.optimizer.param_groups[0]["lr"] = 0.25
    setup.bad_epochs = 4
    setup.state["ema"]["shadow"][1] = 2.0
    diff = diff_states(before, setup)
    # how many tensors there are depends on the machine's accelerators
    assert str(diff).replace(f"of {diff.num_tensors} tensors", "of 27 tensors") == text("""
        different: 2 of 27 tensors, 3 plain values
          a: a
          b: the setup

        optimizer 'optimizer'
          elements  largest  relative  tensor
            1 of 1        1     0.769  exp_avg of head.bias
                                         [0]: 0.3 -> 1.3
          param_groups[0].lr: 0.5 -> 0.25

        scheduler 'scheduler'
          last_epoch: 0 -> 1

        setup
          elements  largest  relative  tensor
            1 of 2        2         1  setup.state['ema'].shadow
                                         [1]: 0 -> 2
          setup.bad_epochs: 3 -> 4
    """)


def test_live_setups_are_called_so():
    """The side that is a live setup is the setup; of two, the letter tells which."""
    setup = make_setup()
    state = copy.deepcopy(training_state(setup))
    labels = [(diff.a, diff.b) for diff in (diff_states(setup, state), diff_states(state, setup))]
    assert labels == [("the setup", "b"), ("a", "the setup")]
    both = diff_states(setup, make_setup())
    assert (both.a, both.b) == ("setup a", "setup b")


def test_names_of_a_setup_are_those_of_the_person():
    """What a difference's path is called."""
    setup = make_setup()
    setup.bad_epochs, setup.state["ema"] = 3, {"decay": 0.9}
    before = copy.deepcopy(training_state(setup))
    setup.bad_epochs, setup.state["ema"]["decay"], setup.step_index = 4, 0.5, 7
    setup.optimizer.param_groups[0]["betas"] = (0.9, 0.5)
    paths = [difference.path for difference in diff_states(before, setup).differences]
    assert paths == [
        "optimizer 'optimizer': param_groups[0].betas",
        "setup.step_index",
        "setup.bad_epochs",
        "setup.state['ema'].decay",
    ]


def test_modules_are_grouped():
    """A module whose tensors all differ is one row, with the sum of its elements and the largest difference."""
    a = {f"encoder.{i}.weight": torch.zeros(4) for i in range(3)} | {
        "head.weight": torch.zeros(2),
        "head.bias": torch.ones(1),
    }
    b = {name: tensor + (1.0 + tensor.numel() if "encoder" in name else 0.0) for name, tensor in a.items()}
    b["encoder.1.weight"][2] = 9.0
    b["head.bias"] = torch.tensor([3.0])
    assert str(diff_states(a, b)) == text("""
        different: 4 of 5 tensors
          a: a
          b: b

        tensors
          elements  largest  relative  tensor
          12 of 12        9         1  encoder.* (3 tensors)
                                         encoder.1.weight[2]: 0 -> 9
            1 of 1        2     0.667  head.bias
                                         [0]: 1 -> 3
    """)


def test_many_rows_are_cut():
    """A section shows twelve rows, then says how many more there are, with their largest difference."""
    a = {f"layer{i}": torch.zeros(1) for i in range(15)} | {"same": torch.zeros(1)}
    b = {name: tensor + (0.0 if name == "same" else 1.0) for name, tensor in a.items()}
    b["layer13"] += 1.0
    lines = str(diff_states(a, b)).splitlines()
    assert len([line for line in lines if line.endswith("0 -> 1")]) == 12
    assert lines[-2:] == [
        "    3 of 3        2         1  ... and 3 more tensors",
        "                                 layer13[0]: 0 -> 2",
    ]


def test_kinds_of_differences_stand_apart():
    """Shape, dtype, NaN, plain values and types in one text."""
    a = {
        "w": {"shape": torch.ones(2), "kind": torch.ones(2), "nan": torch.ones(3)},
        "args": {"lr": 0.1, "n": 3, "l": [1]},
    }
    b = {
        "w": {"shape": torch.ones(3), "kind": torch.ones(2).half(), "nan": torch.tensor([1, float("nan"), 1])},
        "args": {"lr": 0.2, "n": 3.0, "l": (1,)},
    }
    assert str(diff_states(a, b)) == text("""
        different: 3 of 3 tensors, 3 plain values
          a: a
          b: b

        w
          elements  largest  relative  tensor
                 -        -         -  shape
                                         shape [2] -> [3]
            0 of 2        -         -  kind
                                         dtype float32 -> float16
            1 of 3        -         -  nan
                                         NaN: 1 in b only

        args
          lr: 0.1 -> 0.2
          n: int 3 -> float 3.0
          l: list [1] -> tuple (1,)
    """)


def test_only_in_one_side():
    """What is missing is listed with its type; whole modules and sections in one line."""
    a = {"model": {"x.a": torch.ones(1), "x.b": torch.ones(1), "y": torch.ones(2, 3)}, "scaler": {"scale": 2.0, "n": 1}}
    b = {"model": {"y": torch.ones(2, 3)}, "args": {"lr": 0.1}}
    diff = diff_states(a, b)
    assert str(diff) == text("""
        different: 4 only in a, 1 only in b
          a: a
          b: b

        only in a
          model: x.* (2 tensors)
          scaler: all 2 entries

        only in b
          args: lr: 0.1
    """)
    assert [str(entry) for entry in (*diff.only_in_a, *diff.only_in_b)] == [
        "model: x.a (float32 [1])",
        "model: x.b (float32 [1])",
        "scaler: scale (2.0)",
        "scaler: n (1)",
        "args: lr (0.1)",
    ]


def test_the_tolerance_is_told():
    """What differs within the tolerance is counted, floats among plain values included."""
    a, b = {"w": torch.ones(2), "lr": 0.1, "n": 1}, {"w": torch.ones(2) + 1e-4, "lr": 0.1000001, "n": 2}
    diff = diff_states(a, b, rtol=1e-3)
    assert str(diff) == text("""
        different: 1 plain value
          a: a
          b: b
          2 more differ within rtol 0.001, atol 0

        values
          n: 1 -> 2
    """)
    del a["n"], b["n"]
    assert str(diff_states(a, b, rtol=1e-3)).splitlines()[-1] == "  2 of them differ within rtol 0.001, atol 0"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1}, OrderedDict(x=1)),
        (Counter({3: 1}), {3: 1}),
        ({"x": float("nan")}, {"x": float("nan")}),
        ({"x": {1, 2}}, {"x": {2, 1}}),
        ({"x": np.arange(3)}, {"x": np.arange(3)}),
        ({"x": np.array(["2020-01-01"], "M8[D]")}, {"x": np.array(["2020-01-01"], "M8[D]")}),
        ({"x": b"ab"}, {"x": bytearray(b"ab")}),
        ({"x": deque([torch.ones(1)])}, {"x": deque([torch.ones(1)])}),
        ({"x": torch.float16}, {"x": torch.float16}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({}, {}),
    ],
)
def test_what_is_the_same(a, b):
    """Order and kind of mappings do not matter; arrays, bytes and NaN are compared by value."""
    assert diff_states(a, b).same


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (1, True, "int 1 -> bool True"),
        (None, 0, "NoneType None -> int 0"),
        ("adam", "sgd", "'adam' -> 'sgd'"),
        ([1, 2], [1, 2, 3], "[1, 2] -> [1, 2, 3]"),
        (list(range(50)), [*range(49), 0], "1 of 50 items differ, [49]: 49 -> 0"),
        (list(range(50)), list(range(60)), "50 items -> 60 items"),
        ("x" * 80 + "a", "x" * 80 + "b", "...xxxxxxxxxxa' -> ...xxxxxxxxxxb'"),
        ({"k": 1}, 5, "dict -> 5"),
        ({}, [], "empty dict -> empty list"),
        ([{}], [1], "list -> [1]"),
        (torch.ones(2), 1.0, "float32 [2] -> 1.0"),
        (torch.float16, torch.float32, "torch.float16 -> torch.float32"),
    ],
)
def test_how_plain_differences_are_told(a, b, told):
    """One line that shows what changed."""
    (difference,) = diff_states({"x": a}, {"x": b}).differences
    assert str(difference) == f"x: {told}"


def test_empty_containers_are_not_lost():
    """An empty container in one state only is listed."""
    diff = diff_states({"x": 1, "hooks": {}}, {"x": 1})
    assert [str(entry) for entry in diff.only_in_a] == ["hooks (empty dict)"]
    assert diff_states({"x": {"h": []}}, {"x": {}}).only_in_a[0].what == "empty list"


def test_an_array_and_a_tensor_differ_in_type():
    """A numpy array is not a tensor, though its values are compared."""
    (difference,) = diff_states({"x": np.ones(2, np.float32)}, {"x": torch.ones(2)}).differences
    assert str(difference) == "x: dtype numpy float32 -> float32"


def test_what_a_terminal_would_obey_is_escaped():
    """Names may hold anything; the text holds no control characters."""
    diff = diff_states({"m": {"\x1b[31mred\n": torch.ones(1)}}, {"m": {}})
    assert str(diff).splitlines()[-1] == "  m: \\x1b[31mred\\n: float32 [1]"


def test_a_state_that_holds_itself_is_refused():
    """Endless nesting is an error, not a hang."""
    state = {"x": {}}
    state["x"]["x"] = state
    with pytest.raises(ValueError, match=r"^the state is nested too deeply, or holds itself$"):
        diff_states(state, {})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ([1], {}),
            TypeError,
            "a must be a state (a nested dict), a TrainingSetup or the path of a file or folder, got a list",
        ),
        (
            ({}, nn.Linear(1, 1)),
            TypeError,
            "b must be a state (a nested dict), a TrainingSetup or the path of a file or folder, got a Linear: "
            "pass b.state_dict()",
        ),
    ],
)
def test_other_things_are_refused(arguments, error, message):
    """Misuse names the argument, what was got and what is allowed."""
    with pytest.raises(error) as caught:
        diff_states(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(("value", "got"), [(-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_tolerances_must_make_sense(value, got):
    """A tolerance is a finite number of at least 0."""
    with pytest.raises(ValueError, match=rf"^atol must be finite and at least 0, got {got}$"):
        diff_states({}, {}, atol=value)
    with pytest.raises(TypeError, match=r"^rtol must be a number, got a str$"):
        diff_states({}, {}, rtol="1")


def test_long_names_leave_their_place_in_the_table():
    """Where a line below a name would be longer than a terminal is wide, the lines of its table stand further left."""
    name = "layers.0.post_attention_layernorm.weight"
    state = {name: {"exp_avg": torch.zeros(4)}, "x": {"exp_avg": torch.zeros(4)}}
    a = {"optimizer": {"state": state, "param_groups": [{"params": [name, "x"]}]}}
    b = copy.deepcopy(a)
    b["optimizer"]["state"][name]["exp_avg"][1] = -0.25
    b["optimizer"]["state"]["x"]["exp_avg"][1] = -0.125
    assert str(diff_states(a, b)) == text("""
        different: 2 of 2 tensors
          a: a
          b: b

        optimizer
          elements  largest  relative  tensor
            2 of 8     0.25         1  exp_avg of all 2 tensors
              layers.0.post_attention_layernorm.weight[1]: 0 -> -0.25
    """)


def test_lazy_and_nested_tensors():
    """A lazy module's tensors have no values; nested tensors are compared part by part."""
    lazy = nn.LazyLinear(2)
    assert diff_states(lazy.state_dict(), lazy.state_dict()).same
    parts = [torch.ones(2), torch.ones(3)]
    other = [torch.ones(2), torch.zeros(3)]
    nested = [torch.nested.nested_tensor(p, layout=torch.jagged) for p in (parts, other)]
    assert diff_states({"x": nested[0]}, {"x": nested[0]}).same
    assert [item.path for item in diff_states({"x": nested[0]}, {"x": nested[1]}).differences] == ["x[1]"]
