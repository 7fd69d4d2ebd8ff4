import sys

import pytest
import torch

from tl_resume._check._content import content_digest
from tl_resume._check._draws import _as_indices


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*quantiz:DeprecationWarning")
def test_digests_tell_contents_apart():
    """Dtype, shape, layout and bytes count, wherever they stand; equal contents have one digest."""
    numpy = pytest.importorskip("numpy")
    steps = torch.arange(6, dtype=torch.int32)

    class Sample:
        def __init__(self, x):
            self.x = x

    different = [
        steps,
        steps.float(),
        steps.reshape(2, 3),
        steps.reshape(2, 3).to_sparse(),
        steps.reshape(2, 3).float().to_sparse_csr(),
        steps.reshape(2, 3).float().to_sparse_csc(),
        torch.nested.nested_tensor([steps.float(), steps[:2].float()]),
        torch.nested.nested_tensor([steps.float(), steps[:2].float()], layout=torch.jagged),
        torch.quantize_per_tensor(steps.float(), 0.1, 0, torch.qint8),
        steps.bfloat16(),
        steps.to("meta"),
        torch.tensor(1j).conj(),
        torch.tensor(1j),
        torch.tensor(5),
        torch.empty(0),
        torch.empty(0, 2),
        steps.numpy(),
        numpy.float32(1.0),
        numpy.array([None, 1]),
        [1, 2],
        [[1], 2],
        (1, 2),
        {"a": 1},
        {"b": 1},
        {1, 2},
        "a",
        b"a",
        1,
        1.0,
        True,
        None,
        Sample(1),
        Sample(2),
    ]
    digests = [content_digest(value) for value in different]
    assert len(set(digests)) == len(different)
    assert digests == [content_digest(value) for value in different]
    assert content_digest(steps.reshape(2, 3).t()) == content_digest(steps.reshape(2, 3).t().contiguous())
    assert len(digests[0]) == 32
    nested, sample = [], Sample(1)
    nested.append(nested)
    sample.x = [sample] * 50
    assert len(content_digest(nested, sample)) == 32


def test_numpy_is_not_needed(monkeypatch):
    """Digests and indices do without numpy."""
    expected = content_digest([torch.ones(2), 1.5])
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    assert content_digest([torch.ones(2), 1.5]) == expected
    assert _as_indices([1, 2]) == (1, 2)
