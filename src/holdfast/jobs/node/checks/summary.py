"""Summary of the checks of an attempt, for people; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from holdfast.jobs.node.checks.disk import FEW_BYTES
from holdfast.jobs.node.checks.result import Check, NodeChecks
from holdfast.system.units import format_bytes, plural

_Values = Mapping[str, float]


def describe_checks(found: Mapping[int, NodeChecks]) -> Iterator[str]:
    """Yield one line per node and check, those of a node behind its own line.

    Args:
        found: results by node.
    """
    for rank, checks in sorted(found.items()):
        failed = len(checks.failed)
        outcome = f"{plural(failed, 'check')} failed" if failed else "all checks passed"
        refused = ", the attempt was not started" if checks.was_refused else ""
        waited = f"{checks.took_s:.2f} s, of which the job waited {checks.added_s:.2f} s"
        yield f"node {rank} ({checks.machine}): {outcome} in {waited}{refused}"
        for one in checks.checks:
            yield f"  {one.name} {one.where}: {_result(one)}"


def _result(check: Check) -> str:
    numbers = _NUMBERS[check.name](check.values) if check.name in _NUMBERS and check.values else ""
    return "; ".join(filter(None, (check.trouble, numbers))) or "passed"


def _rate(num_bytes: float, seconds: float) -> str:
    return f"{format_bytes(num_bytes / seconds)}/s" if seconds > 0 else "-"


def _disk(values: _Values) -> str:
    size = values.get("written_bytes", 0.0)
    if size <= FEW_BYTES:  # too few for a rate
        return f"{format_bytes(size)} written and synced in {1000 * values.get('write_s', 0.0):.0f} ms"
    write, read = (_rate(size, values.get(name, 0.0)) for name in ("write_s", "read_s"))
    return f"{format_bytes(size)} written and synced at {write}, read back at {read}"


def _space(values: _Values) -> str:
    needed, free = (format_bytes(values.get(name, 0.0)) for name in ("needed_bytes", "free_bytes"))
    return f"the next save takes {needed}, {free} free"


def _memory(values: _Values) -> str:
    free, total = (format_bytes(values.get(name, 0.0)) for name in ("available_bytes", "total_bytes"))
    return f"{free} of {total} free"


def _copy(values: _Values) -> str:
    return _rate(values.get("copied_bytes", 0.0), values.get("copy_s", 0.0))


def _product(values: _Values) -> str:
    size = values.get("size", 0.0)
    return f"matrices of {size:.0f} x {size:.0f}, in {1000 * values.get('products_s', 0.0):.0f} ms"


def _clock(values: _Values) -> str:
    return f"{values.get('offset_s', 0.0) + 0.0:+.2f} s"


_NUMBERS: Mapping[str, Callable[[_Values], str]] = {
    "disk": _disk,
    "space": _space,
    "memory": _memory,
    "copy": _copy,
    "gpu": _copy,
    "product": _product,
    "clock": _clock,
}
