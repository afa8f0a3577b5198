"""Equality of values of checkpoints, bit for bit and type for type."""

from __future__ import annotations

import argparse
import collections
import io
import math
import types
from typing import Any

import numpy as np
from msgspec.structs import astuple

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.values import SavedDataclass, SavedNamedTuple


def bytes_of(array: Any) -> bytes:
    """The bytes of the fields: those between them mean nothing."""
    filled = np.zeros(array.shape, array.dtype)
    filled[...] = array
    return filled.tobytes()


def content(value: Any) -> Any:
    return (value.getvalue(), value.tell()) if isinstance(value, io.BytesIO) else value


def same(a: Any, b: Any) -> bool:
    """Equal in value and type all the way down, NaN equal to NaN, -0.0 different from 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple, collections.deque)):
        is_as_long = len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        return is_as_long and all(map(same, a, b))
    if isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        return same(vars(a), vars(b))
    if isinstance(a, (SavedDataclass, SavedNamedTuple, SavedTensor)):
        return same(astuple(a), astuple(b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return content(a) == content(b)
