"""Draws the description of a sharded model as text: a head in words, then the tree of its units; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.quantity import say_bytes

if TYPE_CHECKING:
    from holdfast.train.sharding.description import Description, Part, Unit

_COLUMN = 36


def draw(description: Description) -> str:
    """Text for people, without a newline at its end."""
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
