"""The plain tensors that sparse ones are made of."""

from __future__ import annotations

import torch
from torch import Tensor

COMPRESSED = {
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}
SPARSE = (torch.sparse_coo, *COMPRESSED)


def sparse_parts(value: Tensor) -> dict[str, Tensor]:
    """Give the parts of a tensor of a layout of ``SPARSE``, under the names that they have in files and messages."""
    value = value.detach()
    if value.layout is torch.sparse_coo:
        # indices() and values() refuse a tensor that is not coalesced
        return {"indices": value._indices(), "values": value._values()}
    by_rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    return {
        "pointers": value.crow_indices() if by_rows else value.ccol_indices(),
        "indices": value.col_indices() if by_rows else value.row_indices(),
        "values": value.values(),
    }
