"""Results of the checks of a node, as a document, and their mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from holdfast.errors import Corrupt
from holdfast.jobs.journal import load_document

MODE = "HOLDFAST_NODE_CHECKS"  # variable of a job: `stop` (default), `report` or `off`
STOP, REPORT, OFF = "stop", "report", "off"
_OFF_IN_YAML = ("false", "no")  # text of an unquoted `off` in a task file, which is a truth value in YAML
MAX_RESULT_BYTES = 64 << 10
_MAX_TROUBLE = 300


class Check(Struct, frozen=True):
    """Result of one check.

    Attributes:
        name: `disk`, `space`, `memory`, `copy`, `product`, `clock` or `gpu`.
        where: the folder, core or device.
        trouble: why it failed; empty if it passed.
        stops: an attempt cannot succeed with this failure, so it is not started.
        is_wrong: the machine returned a wrong result: other bytes, or another product.
        values: measured numbers, by name with unit.
    """

    name: str
    where: str = ""
    trouble: str = ""
    stops: bool = False
    is_wrong: bool = False
    values: Mapping[str, float] = {}


class NodeChecks(Struct, frozen=True):
    """Results of all checks of one node before an attempt.

    Attributes:
        machine: name of the machine.
        unix_s: time of the checks, on its clock.
        took_s: time from their start until the last result.
        added_s: part of it that the commands of the job had to wait.
        checks: the results.
        was_refused: the attempt was not started because of them.
    """

    machine: str
    unix_s: float
    took_s: float
    added_s: float
    checks: tuple[Check, ...]
    was_refused: bool = False

    @property
    def failed(self) -> tuple[Check, ...]:
        """Checks that failed."""
        return tuple(one for one in self.checks if one.trouble)


def read_mode(text: str | None) -> str | None:
    """Return the mode that the variable of a job names; None if it is none of them."""
    wanted = (text or STOP).strip().lower()
    if wanted in _OFF_IN_YAML:
        return OFF
    return wanted if wanted in (STOP, REPORT, OFF) else None


def describe_failures(checks: Iterable[Check]) -> str:
    """Return failed checks for people."""
    return "; ".join(f"{one.name} {one.where}: {one.trouble}"[:_MAX_TROUBLE] for one in checks)


def read_checks(path: Path) -> NodeChecks | None:
    """Return the results of a node, or None if missing or damaged."""
    with suppress(OSError, Corrupt):
        return load_document(path, NodeChecks, max_bytes=MAX_RESULT_BYTES)
    return None
