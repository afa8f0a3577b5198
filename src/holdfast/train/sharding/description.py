"""Description of a sharded model: facts by unit and by module, and their text; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.system.units import format_bytes
from holdfast.train.sharding.mesh_layout import MeshLayout

_COLUMN = 36


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered and freed together.

    Args:
        num_params: elements of all parameters, unsharded.
        num_bytes: bytes of all parameters, in the optimizer's dtype.
        local_bytes: bytes of this rank's shard.
        gathered_bytes: additional bytes of a rank while it computes with them.
        is_kept: the parameters stay gathered between forward and backward.
        is_recomputed: backward recomputes the activations.
        is_compiled: the forward is compiled separately.
    """

    num_params: int
    num_bytes: int
    local_bytes: int
    gathered_bytes: int
    is_kept: bool
    is_recomputed: bool = False
    is_compiled: bool = False


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module with parameters, in the tree of a description.

    Args:
        name: name within its parent.
        kind: class name.
        num_params: elements of its own parameters and of children without a node, outside of inner units.
        unit: its unit, if the module is one.
        tied: other names of its parameters. For a parameter that was already counted, its first name.
        children: nodes of its children.
    """

    name: str = field(compare=False)
    kind: str
    num_params: int
    unit: Unit | None
    tied: tuple[str, ...] = ()
    children: tuple[ModuleNode, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """Sharding of a model across ranks. `print` shows it.

    Attributes:
        kind: class of the model.
        layout: the ranks that share one copy. None if the model is not sharded.
        device: device type of the computation.
        backend: backend for its tensors.
        dtype: dtype of the computation. None computes in the parameters' dtype.
        is_offloaded: parameters live in host memory.
        num_params: elements of all parameters.
        num_bytes: bytes of all parameters.
        local_bytes: bytes of this rank's shards.
        units: units by name. The unit of the whole model is "".
        root: tree of modules.
        notes: remarks for the reader.
    """

    kind: str
    layout: MeshLayout | None
    device: str
    backend: str
    dtype: torch.dtype | None
    is_offloaded: bool
    num_params: int
    num_bytes: int
    local_bytes: int
    units: dict[str, Unit]
    root: ModuleNode
    notes: tuple[str, ...]

    @property
    def gathered_bytes(self) -> int:
        """Most bytes of gathered parameters at once: units that are kept, and two others."""
        kept = sum(unit.gathered_bytes for unit in self.units.values() if unit.is_kept)
        freed = sorted(unit.gathered_bytes for unit in self.units.values() if not unit.is_kept)
        return kept + sum(freed[-2:])  # the next one is gathered while one computes

    def __str__(self) -> str:
        notes = (f"  note: {note}" for note in self.notes)
        return "\n".join([*_head(self), *_lines(self.root, "", "", is_root=True), *notes])


# -- as text -------------------------------------------------------------------------------------------------


def _head(found: Description) -> Iterator[str]:
    size = f"{found.num_params:,} parameters, {format_bytes(found.num_bytes)}"
    if found.layout is None:
        yield f"{found.kind}: {size}"
        return
    root = found.units.get("")
    inner = [unit for name, unit in found.units.items() if name]
    is_kept = all(unit.is_kept for unit in inner) if inner else root is not None and root.is_kept
    layout = found.layout.describe(reshard_after_forward=not is_kept)
    yield f"{found.kind} {layout}, on {found.device} over {found.backend}"
    share = found.local_bytes / found.num_bytes if found.num_bytes else 1.0
    yield (
        f"  {size}; this rank holds {format_bytes(found.local_bytes)} ({share:.1%}) and gathers up to "
        f"{format_bytes(found.gathered_bytes)} more"
    )
    yield from (f"  {line}" for line in _features(found, inner))


def _features(found: Description, inner: Sequence[Unit]) -> Iterator[str]:
    if found.dtype is not None:
        yield f"computes in {str(found.dtype).removeprefix('torch.')}, averages gradients in float32"
    features = [
        ("offloaded to host memory", found.is_offloaded),
        ("recomputed in backward", any(unit.is_recomputed for unit in inner)),
        ("compiled by block", any(unit.is_compiled for unit in inner)),
    ]
    if texts := [text for text, applies in features if applies]:
        yield ", ".join(texts)


def _lines(
    node: ModuleNode, first: str, rest: str, *, label: str = "", is_root: bool = False
) -> Iterator[str]:
    title = node.kind if is_root else f"{label or node.name}: {node.kind}"
    yield (f"  {first}{title}".ljust(_COLUMN) + "  " + _facts(node)).rstrip()
    runs = list(_runs(node.children))
    for i, (child, name) in enumerate(runs):
        is_last = i == len(runs) - 1
        branch, stem = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield from _lines(child, rest + branch, rest + stem, label=name)


def _facts(node: ModuleNode) -> str:
    tied = f", tied to {', '.join(node.tied)}" if node.tied else ""
    if node.unit is None:
        return f"{node.num_params:,}{tied}" if node.num_params or tied else ""
    unit = node.unit
    kept = "kept after forward" if unit.is_kept else "freed after forward"
    own, whole = format_bytes(unit.local_bytes), format_bytes(unit.num_bytes)
    sizes = f"{unit.num_params:,} parameters, {own} of {whole} here"
    return f"unit: {sizes}, {kept}{tied}"


def _runs(nodes: Sequence[ModuleNode]) -> Iterator[tuple[ModuleNode, str]]:
    """Yield nodes with their labels, equal neighbours as one: `(0-5): 6 x Block`."""
    start = 0
    while start < len(nodes):
        end = start + 1
        while end < len(nodes) and nodes[end] == nodes[start] and nodes[end].name.isdigit():
            end += 1
        count = end - start
        label = (
            f"{nodes[start].name}-{nodes[end - 1].name}, {count} times" if count > 1 else nodes[start].name
        )
        yield nodes[start], label
        start = end
