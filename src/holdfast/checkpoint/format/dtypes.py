"""The dtypes that a safetensors file can hold, by their safetensors names."""

from __future__ import annotations

_DTYPES = {
    "F64": (8, "float64"),
    "I64": (8, "int64"),
    "U64": (8, "uint64"),
    "C64": (8, "complex64"),
    "F32": (4, "float32"),
    "I32": (4, "int32"),
    "U32": (4, "uint32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I16": (2, "int16"),
    "U16": (2, "uint16"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}
ITEM_BYTES = {name: item_bytes for name, (item_bytes, _) in _DTYPES.items()}
"""Bytes of one element, by safetensors dtype name."""
TORCH_NAMES = {name: label for name, (_, label) in _DTYPES.items()}
"""Attribute of the torch module for each safetensors dtype."""
