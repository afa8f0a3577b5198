"""`holdfast diff`: compares two checkpoints, tensor by tensor and value by value."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import math
import re
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from holdfast.checkpoint.format.manifest import EACH
from holdfast.checkpoint.home.documents import read_part
from holdfast.checkpoint.home.newest import deletion_named
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.store import Store
from holdfast.cli import TROUBLE, print_note, values
from holdfast.cli.commands import FILTER, PATIENCE, argument, command
from holdfast.cli.homes import open_home
from holdfast.cli.tables import NO_BAR, Bar, Column, byte_bar, print_result, print_table
from holdfast.errors import Corrupt
from holdfast.system.documents import to_plain
from holdfast.system.units import divide, plural

if TYPE_CHECKING:
    import torch

_BATCH_BYTES = 256 << 20  # of tensors in memory at once, from each side
_SLICE_ITEMS = 1 << 22  # compared at once: in double precision that is some 100 MB
_SIDE = re.compile(r"(.+)@(\d+)")


class Side(Struct, frozen=True):
    """One of the two checkpoints."""

    name: str
    store: Store
    checkpoint: Checkpoint

    def state(self, rank: int) -> dict[str, Any]:
        """Return the values that a rank saved, by path, as tagged JSON."""
        part = read_part(self.store, self.checkpoint.manifest, rank)
        return dict(leaf for key, value in part.values.items() for leaf in values.leaves(value, key))


class TensorChange(Struct, frozen=True):
    """A tensor that differs. It has no numbers if dtype or shape differ."""

    name: str
    how: str
    num_changed: int | None = None
    num_items: int | None = None
    max_abs: float | None = None  # NaN if only one side has NaN at some place
    mean_abs: float | None = None  # over all elements


class Difference(Struct, frozen=True):
    """Differences of two checkpoints. Each value has its path and its text on both sides, None if missing."""

    only_a: list[str]
    only_b: list[str]
    changed: list[TensorChange]
    values: list[tuple[str, str | None, str | None]]
    num_compared: int

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.changed or self.values)


@command(
    "diff",
    """
    holdfast diff runs/gpt@500 runs/gpt@1000
    holdfast diff runs/gpt runs/gpt-again --filter 'model.*'
    holdfast diff runs/gpt@500 runs/other@500 --within 1e-6 && echo same
    """,
    PATIENCE,
    argument("a A", "HOME for the newest checkpoint, or HOME@STEP"),
    argument("b B", "HOME for the newest checkpoint, or HOME@STEP"),
    argument(
        "--within X", "treat numbers as equal if they differ by at most X (default: 0)", float, default=0.0
    ),
    FILTER,
    details="The exit status is 1 if they differ, as with diff(1).",
)
def run(args: argparse.Namespace) -> int:
    """Compare the checkpoints. Damage is an error (2) here, because 1 means that they differ."""
    try:
        a, b = _open("A", args.a), _open("B", args.b)
        for side in (a, b) if not args.json else ():
            found = side.checkpoint
            print(f"{side.name}: {side.store.url}, step {found.step}, attempt {found.attempt}")
        if not args.json and a.checkpoint.world_size != b.checkpoint.world_size:
            print("The numbers of ranks differ, so per-rank state is compared for rank 0 only.")
        with contextlib.ExitStack() as stack:
            for side in (a, b):
                stack.enter_context(deletion_named(side.store, side.checkpoint.manifest.checkpoint_id))
            bar = stack.enter_context(byte_bar("diff"))
            difference = compare(a, b, pattern=args.filter or "*", within=args.within, bar=bar)
    except Corrupt as error:
        print_note(error)
        return TROUBLE
    print_result(args, _as_json(a, b, difference), lambda: _print(difference))
    return int(bool(difference))


def _open(name: str, place: str) -> Side:
    found = _SIDE.fullmatch(place)
    store, _ = open_home(found[1] if found else place)
    return Side(name, store, open_checkpoint(store, int(found[2]) if found else None))


def _facts(side: Side) -> dict[str, Any]:
    return {"home": side.store.url, "step": side.checkpoint.step, "attempt": side.checkpoint.attempt}


def _as_json(a: Side, b: Side, difference: Difference) -> dict[str, Any]:
    facts = {"a": _facts(a), "b": _facts(b), **to_plain(difference)}
    for change in facts["changed"]:
        for name in ("max_abs", "mean_abs"):
            if change[name] is not None and not math.isfinite(change[name]):
                change[name] = str(change[name])
    facts["values"] = [dict(zip(("name", "a", "b"), row, strict=True)) for row in difference.values]
    return facts


def compare(a: Side, b: Side, *, pattern: str = "*", within: float = 0.0, bar: Bar = NO_BAR) -> Difference:
    """Compare two checkpoints, in limited memory.

    Per-rank state is compared rank by rank if both checkpoints have the same number of ranks. Otherwise only
    that of rank 0 is compared.

    Args:
        pattern: glob of the names of tensors and values to compare.
        within: absolute difference up to which numbers of tensors count as equal.
    """
    keys_a, keys_b = (fnmatch.filter(side.checkpoint.keys(), pattern) for side in (a, b))
    shared = set(keys_a) & set(keys_b)
    infos = {key: (a.checkpoint.info(key), b.checkpoint.info(key)) for key in keys_a if key in shared}
    # Tensors that are tied on both sides are compared once.
    both = [
        key
        for key, (in_a, in_b) in infos.items()
        if in_a.tied_to not in shared or in_a.tied_to != in_b.tied_to
    ]
    num_ranks = a.checkpoint.world_size
    bar.on_total(sum(infos[key][0].num_bytes for key in both))
    changed: list[TensorChange] = []
    changed_values: list[tuple[str, str | None, str | None]] = []
    for rank in range(num_ranks if num_ranks == b.checkpoint.world_size else 1):
        suffix = f"@r{rank}" if rank else ""
        names = [key for key in both if not rank or EACH in (infos[key][0].owner, infos[key][1].owner)]
        changed += _changes(a, b, names, rank, within, suffix, bar)
        changed_values += _value_changes(a.state(rank), b.state(rank), pattern, suffix)
    return Difference(
        only_a=sorted(set(keys_a) - set(keys_b)),
        only_b=sorted(set(keys_b) - set(keys_a)),
        changed=changed,
        values=changed_values,
        num_compared=len(both),
    )


def _changes(
    a: Side, b: Side, names: list[str], rank: int, within: float, suffix: str, bar: Bar
) -> Iterator[TensorChange]:
    sizes = {name: a.checkpoint.info(name).num_bytes for name in names}
    for batch in divide(sizes.items(), _BATCH_BYTES):
        read = {side.name: _read(side, batch, rank) for side in (a, b)}
        for name in batch:
            found = {side: tensors[name] for side, tensors in read.items() if name in tensors}
            if len(found) == 1:
                yield TensorChange(name + suffix, f"only in {next(iter(found))}")
            elif found and (change := _change(name + suffix, found, within)):
                yield change
        bar.on_bytes(sum(sizes[name] for name in batch))


def _read(side: Side, names: list[str], rank: int) -> dict[str, torch.Tensor]:
    """Read and verify the tensors of a rank. Tensors that the rank does not have are left out."""
    import torch  # slow, so imported only when it is needed

    from holdfast.checkpoint.format.layout import FillTarget
    from holdfast.checkpoint.restore.fill import fill
    from holdfast.checkpoint.restore.parts import Parts
    from holdfast.checkpoint.state.tensors import torch_dtype

    manifest = side.checkpoint.manifest
    parts, found = Parts(side.store, manifest), {}
    for name in names:
        saved = parts.shape_of(manifest.tied.get(name, name), rank)
        if saved is not None:
            found[name] = torch.empty(saved[1], dtype=torch_dtype(saved[0]), device="cpu")
    targets = {name: [FillTarget(tensor)] for name, tensor in found.items()}
    fill(parts, targets, rank)
    return found


def _change(name: str, sides: dict[str, torch.Tensor], within: float) -> TensorChange | None:
    import torch

    a, b = sides.values()
    if a.dtype != b.dtype or a.shape != b.shape:
        return TensorChange(name, ", ".join(f"{_kind(x)} in {side}" for side, x in sides.items()))
    num_changed, max_abs, sum_abs = 0, 0.0, 0.0
    left, right = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), _SLICE_ITEMS):
        x, y = left[start : start + _SLICE_ITEMS], right[start : start + _SLICE_ITEMS]
        bits = (x.view(torch.uint8) != y.view(torch.uint8)).reshape(-1, a.element_size()).any(1)
        if bits.any():
            apart = _differences(x, y)
            # Bits may differ where numbers do not: -0.0, payloads of NaN, integers beyond 2^53.
            num_changed += int((apart.isnan() | (apart > within) | (bits & (within == 0))).sum())
            max_abs = max(max_abs, float(apart.max()), key=lambda x: (x != x, x))  # NaN is the largest
            sum_abs += float(apart.sum())
    if not num_changed:
        return None
    return TensorChange(name, _kind(a), num_changed, a.numel(), max_abs, sum_abs / a.numel())


def _differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return absolute differences in double precision: 0 for equal infinities, and for two NaN."""
    import torch

    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return (a - b).abs().masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _value_changes(
    a: dict[str, Any], b: dict[str, Any], pattern: str, suffix: str
) -> Iterator[tuple[str, str | None, str | None]]:
    for path in dict.fromkeys([*a, *b]):
        if fnmatch.fnmatchcase(path, pattern) and (path in a, a.get(path)) != (path in b, b.get(path)):
            text_a, text_b = (values.format_value(side[path]) if path in side else None for side in (a, b))
            yield path + suffix, text_a, text_b


def _print(difference: Difference) -> None:
    for label, names in (("A", difference.only_a), ("B", difference.only_b)):
        for name in names:
            print(f"only in {label}: {name}")
    if difference.changed:
        print_table(_TENSOR_COLUMNS, difference.changed)
    if difference.values:
        headings = ("VALUE", "A", "B")
        columns = [Column(heading, itemgetter(i), "name") for i, heading in enumerate(headings)]
        print_table(columns, [(path, a or "-", b or "-") for path, a, b in difference.values])
    tensors = f"{plural(difference.num_compared, 'tensor')} compared"
    print(f"{tensors}, {len(difference.changed)} differ" if difference else f"{tensors}, no difference")


def _short(number: float | None) -> str | None:
    return None if number is None else f"{number:.3g}"


_TENSOR_COLUMNS = (
    Column("TENSOR", lambda change: change.name, "name"),
    Column("KIND", lambda change: change.how, "name"),
    Column("CHANGED", lambda change: change.num_changed, "right"),
    Column("OF", lambda change: change.num_items, "right", spare=1),
    Column("MAX ABS", lambda change: _short(change.max_abs), "right"),
    Column("MEAN ABS", lambda change: _short(change.mean_abs), "right", spare=2),
)
