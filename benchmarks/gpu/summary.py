"""Summary of the parts: one row for each number, with its goal where it has one. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

PASS, FAIL, NONE = "pass", "FAIL", ""
BLOCKED_S, LOST_COPIES, RESTORE_SHARE = 0.005, 0.2, 0.9
"""Goals of saves: seconds, copies of the state over PCIe, and a share of the limit."""
FIT_SHARE, SHARD_RATIO, COMPILE_SHARE = 0.95, 1.03, 0.15
"""Goals of the training kit: ratios to what each is compared with."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a part."""

    part: str
    what: str
    found: str
    goal: str = ""
    verdict: str = NONE


def rows(document: dict[str, Any]) -> list[Row]:
    """Return the rows of all parts that ran, and a row with the error of each that did not."""
    is_dry = document["machine"]["gpu"] == "cpu"
    found: list[Row] = []
    for name, part in document["parts"].items():
        if error := _error_of(name, part):
            found.append(Row(name, "error", error, "", FAIL))
            continue
        found += _ROWS[name](part)
    if is_dry:  # it shows that the parts work; its numbers are those of tiny states on a CPU
        return [row if row.what == "error" else replace(row, verdict=NONE) for row in found]
    return found


def _error_of(name: str, part: dict[str, Any]) -> str | None:
    if error := part.get("error"):
        return error
    if part["result"] is None and (name not in ("tests", "tune") or part["status"] != 0):
        last = part.get("output", "").strip().splitlines()[-1:] or ["no output"]
        return f"status {part['status']}: {last[0][:80]}"
    return None


def _judged(part: str, what: str, found: float | None, text: str, goal: float, *, at_least: bool) -> Row:
    sign = "at least" if at_least else "at most"
    if found is None:
        return Row(part, what, "not measured", f"{sign} {goal:g}")
    passed = found >= goal if at_least else found <= goal
    return Row(part, what, text, f"{sign} {goal:g}", PASS if passed else FAIL)


def _tests(part: dict[str, Any]) -> Iterator[Row]:
    last = part["output"].strip().splitlines()[-1:] or [""]
    failed = bool(re.search(r"\b(failed|error)", last[0])) or part["status"] != 0
    yield Row("tests", "pytest -m gpu", last[0].strip("= "), "all pass", FAIL if failed else PASS)


def _stalls(part: dict[str, Any]) -> Iterator[Row]:
    runs = part["result"]["runs"]
    copies = {run["state"]: run["values"]["memcpy_s"] for run in runs if run["contestant"] == "limits"}
    for run in runs:
        if run["contestant"] == "limits":
            yield Row("stalls", f"{run['state']}: copy to the host", f"{copies[run['state']]:.3f} s")
        else:
            yield from _stall(run, copies[run["state"]])


def _stall(run: dict[str, Any], copy_s: float) -> Iterator[Row]:
    what = f"{run['state']}: {run.get('title', run['contestant'])}"
    if "values" not in run:
        yield Row("stalls", what, run.get("error") or f"not installed: {run.get('not_installed')}")
        return
    values, is_own = run["values"], run["contestant"] == "holdfast"
    blocked_s = values["blocked_s"]
    text = f"{blocked_s * 1e3:.2f} ms"
    blocked = _judged("stalls", f"{what} blocks, s", blocked_s, text, BLOCKED_S, at_least=False)
    yield blocked if is_own else Row("stalls", f"{what} blocks", text)
    lost = values["lost_s"] / copy_s if "lost_s" in values else None
    text = "" if lost is None else f"{lost:.2f}"
    row = _judged("stalls", f"{what} loses, copies", lost, text, LOST_COPIES, at_least=False)
    yield row if is_own else Row("stalls", f"{what} loses, copies", text)
    yield Row("stalls", f"{what} is durable after", f"{values['durable_s']:.2f} s")
    if "near_read_s" in values and "load_cold_s" in values:
        limit_s = max(values["near_read_s"], values.get("near_memcpy_s", 0.0))
        share = limit_s / values["load_cold_s"]
        yield _judged(
            "stalls",
            f"{what} restores, share of the slower of disk and copy",
            share,
            f"{share:.2f}",
            RESTORE_SHARE,
            at_least=True,
        )


def _overlap(part: dict[str, Any]) -> Iterator[Row]:
    found = part["result"]
    share = found["overlapped_share"]
    yield Row(
        "overlap", "copies from the device beside kernels", "no copies" if share is None else f"{share:.0%}"
    )
    yield Row("overlap", "step() waited for the copy", f"{found['waited_s'] * 1e3:.1f} ms")


def _restore(part: dict[str, Any]) -> Iterator[Row]:
    found = part["result"]["medians"]
    yield Row("restore", "from the keeper's memory", f"{found['memory_s']:.2f} s")
    yield Row("restore", "share of the copy's speed", f"{found['memory_of_memcpy']:.2f}")
    yield Row("restore", "from a cold disk", f"{found['cold_s']:.2f} s")


def _fit(part: dict[str, Any]) -> Iterator[Row]:
    found = part["result"]
    text = (
        f"{found['fitted']} of {found['exhaustive']} ({found['fit_s']:.1f} s, {found['exhaustive_s']:.1f} s)"
    )
    yield _judged("fit", "fit_batch / really out of memory", found["share"], text, FIT_SHARE, at_least=True)


def _shard(part: dict[str, Any]) -> Iterator[Row]:
    for run in part["result"]["runs"]:
        pairs = zip(run["ours"]["s"], run["hand"]["s"], strict=True)
        ratio = sorted(ours / hand for ours, hand in pairs)[len(run["ours"]["s"]) // 2]
        what = f"{run['layout']}: time, by hand is 1"
        yield _judged("shard", what, ratio, f"{ratio:.3f}", SHARD_RATIO, at_least=False)


def _compile(part: dict[str, Any]) -> Iterator[Row]:
    found = part["result"]["medians"]
    what = "processor time on an empty machine, cold is 1"
    yield _judged("compile", what, found["share"], f"{found['share']:.2f}", COMPILE_SHARE, at_least=False)


def _tune(part: dict[str, Any]) -> Iterator[Row]:
    yield Row("tune", "holdfast tune examples/gpt", f"{part['took_s']:.0f} s, status {part['status']}")


_ROWS: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "tests": _tests,
    "stalls": _stalls,
    "overlap": _overlap,
    "restore": _restore,
    "fit": _fit,
    "shard": _shard,
    "compile": _compile,
    "tune": _tune,
}
