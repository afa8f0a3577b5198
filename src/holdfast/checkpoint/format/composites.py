"""Composite tensors: tensors that are stored as other tensors, with a plain description; pure."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, convert

from holdfast.checkpoint.format.array_values import read_array, read_object, read_text
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.limits import Sizes
from holdfast.errors import Unsupported
from holdfast.system.documents import shown

MAX_INNER = 64  # limit of the inner tensors of one composite tensor
MAX_TYPE_CHARS = 1024
DTYPE = "dtype"  # type of a tensor whose dtype safetensors files do not have
DTENSOR = "dtensor"  # type of a sharded tensor whose local tensor is a composite one
UNDER = "@composites"  # key in a module's values that has the composite tensors of the module by name
SPARSE = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""Inner tensors by type of a sparse tensor."""

_BYTE_DTYPES = ("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8")
RAW_DTYPES = {
    "complex128": ("F64", 2),
    "complex32": ("F16", 2),
    "bits16": ("U16", 1),
    **dict.fromkeys(_BYTE_DTYPES, ("U8", 1)),
    **{f"{sign}int{bits}": ("U8", 1) for sign in ("", "u") for bits in range(1, 8)},
}
"""Stored dtype, and stored elements of one element, by the name of a dtype that safetensors lacks."""


class SavedTensor(Struct, frozen=True):
    """A composite tensor.

    In a tree that is fitted to live values, `live` is a tensor of the same type with the same facts, taken
    apart; its own `live` is that tensor.
    """

    type: str  # "module:qualified name" of its class, or a name without colon for torch's own kinds
    inner: dict[str, Any]  # a `TensorRef`, another composite tensor, or in a rebuilt tree the tensor itself
    facts: dict[str, Any]  # plain values that describe it
    live: Any = None

    def __eq__(self, other: object) -> bool:
        is_other = isinstance(other, SavedTensor)
        return is_other and (self.type, self.inner, self.facts) == (other.type, other.inner, other.facts)

    @property
    def is_class(self) -> bool:
        """True if the type is a class of the program."""
        return ":" in self.type


def read_composite(body: Any) -> tuple[str, dict[str, Any], Any]:
    """Return type, encoded inner tensors and encoded facts of a `$composite`."""
    kind, inner, facts = read_array(body, 3)
    inner = read_object(inner)
    if not 0 < len(inner) <= MAX_INNER or "" in inner:
        raise ValueError(f"a composite tensor of {len(inner)} inner tensors")
    return read_text(kind, MAX_TYPE_CHARS), inner, facts


def check_composite(saved: SavedTensor) -> SavedTensor:
    """Return a decoded composite tensor whose description is as its type requires."""
    facts = read_object(saved.facts)
    if saved.is_class:
        return saved
    if saved.type in SPARSE:
        _check_inner(saved, SPARSE[saved.type])
        convert(facts.get("size"), Sizes)
        if saved.type == "sparse_coo" and type(facts.get("coalesced")) is not bool:
            raise ValueError("a sparse tensor without the member coalesced")
    elif saved.type == DTYPE:
        _check_inner(saved, ("raw",))
        name = read_text(facts.get("dtype"), MAX_TYPE_CHARS)
        if name not in RAW_DTYPES:
            raise Unsupported(
                f"A tensor has the dtype {shown(name)}: written by a newer Holdfast? Upgrade to read it."
            )
    elif saved.type == DTENSOR:
        _check_inner(saved, ("local",))
        for member in ("shape", "offsets", "sizes"):
            convert(facts.get(member), Sizes)
    else:
        raise Unsupported(
            f"Unknown type {shown(saved.type)} of a composite tensor: written by a newer Holdfast? "
            "Upgrade to read it."
        )
    return saved


def _check_inner(saved: SavedTensor, names: tuple[str, ...]) -> None:
    if tuple(saved.inner) != names:
        raise ValueError(f"a {saved.type} tensor of {shown(list(saved.inner))} instead of {list(names)}")


def composite_items(value: SavedTensor) -> dict[str, Any]:
    """Return the plain form of a composite tensor: its inner tensors, with its type and its facts."""
    return {**value.inner, "@composite": value.type, "@facts": value.facts}


def shown_type(kind: str, facts: dict[str, Any]) -> str:
    """Return the type of a composite tensor for a message."""
    if kind == DTYPE:
        return f"a torch.{facts['dtype']} tensor"
    if kind == DTENSOR:
        return "a DTensor over a composite tensor"
    return f"a torch.{kind} tensor" if kind in SPARSE else f"a {kind.replace(':', '.')}"


def raw_of(dtype: str) -> tuple[str, int]:
    """Return the stored form of a dtype: another dtype, and its number of elements per element."""
    stored, count = RAW_DTYPES[dtype]
    assert stored in ITEM_BYTES
    return stored, count
