"""Differences of a restored state from the saved one, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.state import Load
from holdfast.errors import ResumeWarning
from holdfast.system.callsite import warn
from holdfast.system.units import plural

_MAX_NAMED = 3  # names in a line
_MAX_SHOWN = 5  # lines of a warning
_MAX_SENT = 20  # lines of a rank


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences of one restore on one rank, as lines. Unlike the load, they keep no memory in use."""

    values: tuple[str, ...] = ()  # live values that are not those of the checkpoint
    left_out: tuple[str, ...] = ()  # names that only the checkpoint has
    generators: tuple[str, ...] = ()  # of the process, that are not set as saved

    @classmethod
    def of(cls, load: Load | None) -> Differences:
        """Return the differences of a completed load."""
        if load is None:
            return cls()
        values = _group(load.notes)
        if names := load.missing:
            num = plural(len(names), "name")
            values.append(
                f"{num} in the live state but not in the checkpoint, left unchanged: {_named(names)}."
            )
        left_out: list[str] = []
        if names := load.unexpected:
            num = plural(len(names), "name")
            left_out.append(
                f"{num} in the checkpoint but not in the live state, not restored: {_named(names)}."
            )
        return cls(tuple(values), tuple(left_out), tuple(load.generator_notes))

    def for_history(self) -> list[str]:
        """Return some lines for a list with semicolons."""
        lines = [*shorten([*self.values, *self.left_out]), *self.generators]
        return [line.rstrip(".") for line in lines]


class DifferenceReport:
    """Report of differences to the user. `steps` restores again, and each is reported once."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._shown: tuple[list[str], list[str]] = ([], [])

    def show(self, step: int, found: Differences) -> None:
        """Warn of values that differ, and log the rest, on rank 0.

        Ranks: collective.
        """
        ranks, lines, harmless = self._components.ranks, list(found.values), list(found.generators)
        # Objects that a caller gives for one load are often a part of the checkpoint.
        (harmless if self._components.pipeline.objects.are_lent else lines).extend(found.left_out)
        lines = merge(ranks.gather(lines[:_MAX_SENT]))
        if ranks.rank != 0 or (lines, harmless) == self._shown:
            return
        self._shown = lines, harmless
        for line in harmless:
            self._components.show(line)
        if lines:
            warn(
                f"The state differs from the checkpoint of step {step} that was restored into it. If that is "
                "not intended, build the objects as they were when they were saved, and restore again:\n  "
                + "\n  ".join(shorten(lines)),
                ResumeWarning,
            )


def _group(notes: Sequence[str]) -> list[str]:
    """Join notes that are alike but for the name that they begin with."""
    labels: dict[str, list[str]] = {}
    for note in notes:
        label, _, text = note.rpartition(": ")
        if not label or " " in label.replace(": ", ""):
            label, text = "", note  # a sentence
        labels.setdefault(text, []).append(label)
    return [f"{_named(names)}: {text}" if names[0] else text for text, names in labels.items()]


def merge(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of all ranks, each once: those of rank 0, then others with their first rank."""
    lines = list(rows[0])
    seen = set(lines)
    for rank, row in enumerate(rows):
        lines += [f"rank {rank}: {line}" for line in row if line not in seen]
        seen.update(row)
    return lines


def shorten(lines: Sequence[str]) -> list[str]:
    """Return the first lines, and the number of those that are left out."""
    left = len(lines) - _MAX_SHOWN
    return [*lines[:_MAX_SHOWN], *([f"and {left} more"] if left > 0 else [])]


def _named(names: Sequence[str]) -> str:
    left = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {left} more" if left > 0 else "")
