from __future__ import annotations

import math

import pytest
import torch

from tl_telemetry._figures import Figures, _stack, norms


def test_figures_are_read_after_their_step():
    """A span has its length at once, and its values when the step's row is closed."""
    figures = Figures()
    first = figures.add([torch.tensor(1.5), torch.tensor(2, dtype=torch.int64)])
    second = figures.add([torch.tensor(0.25, dtype=torch.bfloat16)])
    assert (len(first), len(second)) == (2, 1)
    assert first.values() == []
    figures.close_row()
    third = figures.add([torch.tensor(7.0)])
    figures.close_row()
    assert first.values() == [1.5, 2.0]
    assert second.value() == 0.25
    assert third.value() == 7.0


def test_double_precision_is_kept():
    """One float64 figure makes the whole row float64."""
    figures = Figures()
    third = figures.add([torch.tensor(1 / 3, dtype=torch.float64)])
    figures.add([torch.tensor(1.0)])
    figures.close_row()
    assert third.value() == 1 / 3


def test_figures_of_several_devices_meet_on_the_accelerator():
    """A non-blocking copy to the CPU would be read too early: the CPU's figures go to the other device."""
    figures = [torch.tensor(1.0), torch.empty((), device="meta")]
    assert _stack(figures).device.type == "meta"
    assert _stack(figures[::-1]).device.type == "meta"


@pytest.mark.parametrize(
    ("tensor", "norm"),
    [
        (torch.tensor([3.0, 4.0]), 5.0),
        (torch.tensor([3.0, 4.0], dtype=torch.float64), 5.0),
        (torch.full((4,), 60000.0, dtype=torch.float16), 120000.0),
        (torch.tensor([3.0, 4.0]).to(torch.float8_e4m3fn), 5.0),
        (torch.tensor([3 + 4j, 12j]), 13.0),
        (torch.tensor([3 + 4j, 12j]).conj(), 13.0),
        (torch.sparse_coo_tensor([[1, 1, 3]], [1.0, 2.0, 4.0], (5,), check_invariants=True), 5.0),
        ("csr", 2.0),
        (torch.empty(0), 0.0),
        (torch.tensor([1.0, math.inf]), math.inf),
        (torch.tensor([1.0, math.nan]), math.nan),
    ],
    ids=["float32", "float64", "float16", "float8", "complex", "conjugate", "sparse", "csr", "empty", "inf", "nan"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_norms_of_all_kinds(tensor, norm):
    """The L2 norm of a tensor of any dtype and layout, alone and among others."""
    if isinstance(tensor, str):
        tensor = torch.eye(4).to_sparse_csr()  # warns, which it must not while tests are collected
    others = [torch.tensor([2.0]), torch.tensor([2.0], dtype=torch.float64)]
    alone, among = norms([tensor]), norms([others[0], tensor, others[1]])
    assert [float(value) for value in alone] == [pytest.approx(norm, rel=1e-3, nan_ok=True)]
    assert [float(value) for value in among] == [2.0, pytest.approx(norm, rel=1e-3, nan_ok=True), 2.0]
    assert norms([]) == []
