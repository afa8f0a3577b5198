"""Comparison of a step's checkpoints in two homes, bit for bit: the tensors and values that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.store import open_store
from holdfast.cli.diff import Difference, Side, compare
from holdfast.cli.tables import print_table

_MAX_ROWS = 20


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One tensor or value that differs."""

    key: str
    how: str
    is_tensor: bool = True  # False: a plain value


@dataclass(frozen=True, slots=True)
class CheckpointComparison:
    """Differences of two checkpoints, and the number of tensors and values that were compared."""

    rows: tuple[DifferenceRow, ...]
    num_compared: int

    @property
    def keys(self) -> frozenset[str]:
        """Keys of what differs."""
        return frozenset(row.key for row in self.rows)


def open_side(home: str, step: int, attempt: int | None = None) -> Side:
    """Open a checkpoint for a comparison.

    Raises:
        NotFound: it does not exist.
        RetryLater: the store failed.
    """
    store = open_store(home)
    return Side(store, open_checkpoint(store, step, attempt=attempt))


def compare_sides(a: Side, b: Side, *, of_a: str, of_b: str) -> CheckpointComparison:
    """Compare two checkpoints.

    Args:
        of_a, of_b: the run that each is of, as in "only in the resumed run".

    Raises:
        Corrupt: a checkpoint is damaged.
        RetryLater: a store failed.
    """
    found = compare(a, b)
    return CheckpointComparison(
        tuple(_rows(found, of_a, of_b)), found.num_compared + len(a.checkpoint.values())
    )


def _rows(found: Difference, of_a: str, of_b: str) -> list[DifferenceRow]:
    rows = [DifferenceRow(key, f"only in {of_a}") for key in found.only_a]
    rows += [DifferenceRow(key, f"only in {of_b}") for key in found.only_b]
    for one in found.changed:
        apart = "" if one.max_abs is None else f", up to {one.max_abs:.2g} apart"
        rows.append(DifferenceRow(one.name, f"{one.num_changed} of {one.num_items} numbers{apart}"))
    values = ((key, f"{a or 'nothing'} and {b or 'nothing'}") for key, a, b in found.values)
    return rows + [DifferenceRow(key, how, is_tensor=False) for key, how in values]


def print_rows(rows: Sequence[dict[str, str]]) -> None:
    """Print the first rows as a table."""
    print_table(("KEY", "DIFFERENCE"), [(row["key"], row["how"]) for row in rows[:_MAX_ROWS]])
    if len(rows) > _MAX_ROWS:
        print(f"and {len(rows) - _MAX_ROWS} more; use --json to print all")
