"""The dtypes that a safetensors file can hold, by their safetensors names."""

from __future__ import annotations

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by safetensors dtype name."""

TORCH_NAMES = {
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
    "F32": "float32",
    "I32": "int32",
    "U32": "uint32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I16": "int16",
    "U16": "uint16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Attribute of the torch module for each safetensors dtype."""
