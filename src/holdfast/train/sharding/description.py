"""What is told of how a model is spread over the ranks: facts by unit and by module, and as text; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.quantity import say_bytes
from holdfast.train.sharding.layout import Layout

_COLUMN = 36


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered and freed together.

    Args:
        num_params: elements of all of them, whole.
        num_bytes: of these, as the optimizer sees them.
        local_bytes: of the part that this rank keeps.
        gathered_bytes: of what a rank holds beside that while it computes with them.
        is_kept: they stay gathered between forward and backward.
        is_recomputed: backward computes its activations again.
        is_compiled: its forward is compiled by itself.
    """

    num_params: int
    num_bytes: int
    local_bytes: int
    gathered_bytes: int
    is_kept: bool
    is_recomputed: bool = False
    is_compiled: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A module with parameters, in the tree of a description.

    Args:
        name: within its parent.
        kind: its class.
        num_params: of its own and of children that are not listed, without those of units inside.
        unit: what it is a unit of, if it is one.
        tied: other names of its parameters; of one that has been counted already, its first name.
        parts: children that are listed.
    """

    name: str = field(compare=False)
    kind: str
    num_params: int
    unit: Unit | None
    tied: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """How a model is spread over the ranks; `print` shows it.

    Attributes:
        kind: class of the model.
        layout: how many ranks share one copy; None if nothing is sharded.
        device: type of the device that units are computed on.
        backend: what carries their tensors.
        dtype: what units compute in; None as the parameters are.
        is_offloaded: parameters live in host memory.
        num_params: elements of all parameters.
        num_bytes: of all parameters.
        local_bytes: of those that this rank keeps.
        units: by name; that of the whole model is "".
        root: the tree of modules.
        notes: what a reader should know beside that.
    """

    kind: str
    layout: Layout | None
    device: str
    backend: str
    dtype: torch.dtype | None
    is_offloaded: bool
    num_params: int
    num_bytes: int
    local_bytes: int
    units: dict[str, Unit]
    root: Part
    notes: tuple[str, ...]

    @property
    def gathered_bytes(self) -> int:
        """The most that a rank holds of gathered parameters: units that are kept, and two others at once."""
        kept = sum(unit.gathered_bytes for unit in self.units.values() if unit.is_kept)
        freed = sorted(unit.gathered_bytes for unit in self.units.values() if not unit.is_kept)
        return kept + sum(freed[-2:])  # the next one is gathered beside the one that computes

    def __str__(self) -> str:
        return _draw(self)


# -- as text -------------------------------------------------------------------------------------------------


def _draw(description: Description) -> str:
    """A head in words, then the tree of its units; without a newline at its end."""
    return "\n".join(
        [*_head(description), *_lines(description.root, "", "", is_root=True), *_notes(description)]
    )


def _head(found: Description) -> Iterator[str]:
    size = f"{found.num_params:,} parameters, {say_bytes(found.num_bytes)}"
    if found.layout is None:
        yield f"{found.kind}: {size}"
        return
    root = found.units.get("")
    inner = [unit for name, unit in found.units.items() if name]
    keep = all(unit.is_kept for unit in inner) if inner else root is not None and root.is_kept
    yield f"{found.kind} {found.layout.in_words(keep=keep)}, on {found.device} over {found.backend}"
    share = found.local_bytes / found.num_bytes if found.num_bytes else 1.0
    yield (
        f"  {size}; this rank keeps {say_bytes(found.local_bytes)} ({share:.1%}) and gathers "
        f"up to {say_bytes(found.gathered_bytes)} beside it"
    )
    yield from (f"  {line}" for line in _ways(found, inner))


def _ways(found: Description, inner: Sequence[Unit]) -> Iterator[str]:
    if found.dtype is not None:
        yield f"computes in {str(found.dtype).removeprefix('torch.')}, averages gradients in float32"
    ways = [
        ("offloaded to host memory", found.is_offloaded),
        ("recomputed in backward", any(unit.is_recomputed for unit in inner)),
        ("compiled by block", any(unit.is_compiled for unit in inner)),
    ]
    if said := [text for text, is_so in ways if is_so]:
        yield ", ".join(said)


def _lines(part: Part, first: str, rest: str, *, label: str = "", is_root: bool = False) -> Iterator[str]:
    title = part.kind if is_root else f"{label or part.name}: {part.kind}"
    yield (f"  {first}{title}".ljust(_COLUMN) + "  " + _facts(part)).rstrip()
    runs = list(_runs(part.parts))
    for i, (child, name) in enumerate(runs):
        is_last = i == len(runs) - 1
        branch, stem = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield from _lines(child, rest + branch, rest + stem, label=name)


def _facts(part: Part) -> str:
    tied = f", tied to {', '.join(part.tied)}" if part.tied else ""
    if part.unit is None:
        return f"{part.num_params:,}{tied}" if part.num_params or tied else ""
    unit = part.unit
    kept = "kept after forward" if unit.is_kept else "freed after forward"
    sizes = (
        f"{unit.num_params:,} parameters, {say_bytes(unit.local_bytes)} of {say_bytes(unit.num_bytes)} here"
    )
    return f"unit: {sizes}, {kept}{tied}"


def _runs(parts: Sequence[Part]) -> Iterator[tuple[Part, str]]:
    """Equal neighbours as one: `(0-5): 6 x Block`."""
    start = 0
    while start < len(parts):
        end = start + 1
        while end < len(parts) and parts[end] == parts[start] and parts[end].name.isdigit():
            end += 1
        count = end - start
        label = (
            f"{parts[start].name}-{parts[end - 1].name}, {count} times" if count > 1 else parts[start].name
        )
        yield parts[start], label
        start = end


def _notes(found: Description) -> Iterator[str]:
    return (f"  note: {note}" for note in found.notes)
