"""The dtypes that safetensors carries, and how the others are stored."""

from __future__ import annotations

import torch

# torch's name, the name in the file. Dtypes that this torch does not have are left out.
_NATIVE = (
    ("bool", "BOOL"),
    ("uint8", "U8"),
    ("int8", "I8"),
    ("uint16", "U16"),
    ("int16", "I16"),
    ("uint32", "U32"),
    ("int32", "I32"),
    ("uint64", "U64"),
    ("int64", "I64"),
    ("float8_e5m2", "F8_E5M2"),
    ("float8_e4m3fn", "F8_E4M3"),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
    ("float8_e8m0fnu", "F8_E8M0"),
    ("float16", "F16"),
    ("bfloat16", "BF16"),
    ("float32", "F32"),
    ("float64", "F64"),
    ("complex64", "C64"),
    ("float4_e2m1fn_x2", "F4"),
)
TO_FILE: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in _NATIVE if hasattr(torch, name)}
FROM_FILE: dict[str, torch.dtype] = {code: dtype for dtype, code in TO_FILE.items()}
# safetensors has no name for these: they are stored as real numbers, with a last dimension of 2.
AS_REAL: dict[torch.dtype, str] = {torch.complex128: "F64", torch.complex32: "F16"}
DTYPE_NAMES: dict[torch.dtype, str] = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def is_supported(dtype: torch.dtype) -> bool:
    """Tell whether tensors of a dtype can be stored."""
    return dtype in TO_FILE or dtype in AS_REAL


def file_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Give the dtype's name and the shape under which the header lists a tensor."""
    if dtype in AS_REAL:
        return AS_REAL[dtype], [*shape, 2]
    code = TO_FILE[dtype]
    if code == "F4":  # two numbers share a byte; the header counts numbers, torch counts bytes
        return code, [*shape[:-1], shape[-1] * 2] if shape else [2]
    return code, list(shape)
