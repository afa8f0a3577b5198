"""Summary of the parts: one row for each number, with its goal where it has one. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

PASS, FAIL, NONE = "pass", "FAIL", ""
BLOCKED_S, LOST_COPIES, RESTORE_SHARE, PINNED_SHARE = 0.005, 0.2, 0.9, 0.99
"""Goals of saves: seconds, copies of the state over PCIe, and shares of the limit and of the copied time."""
FIT_SHARE, SHARD_RATIO, COMPILE_SHARE = 0.95, 1.03, 0.15
"""Goals of the training kit: ratios to what each is compared with."""
OWN = "holdfast"
WITHOUT_ANSWER = ("tests", "tune")
"""Parts that do not write a file with results: their exit status and output count."""
MISSED_GOAL = 1
"""Exit status of a part with results that missed a goal of its own. It is judged here."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a part."""

    part: str
    what: str
    found: str
    goal: str = ""
    verdict: str = NONE
    of_goal: float | None = None  # how much of what the goal allows; more than 1 misses it


def rows(document: dict[str, Any]) -> list[Row]:
    """Return a row for each number, and one for each part that failed; a part may have both."""
    is_dry = document["machine"]["gpu"] == "cpu"
    found: list[Row] = []
    for name, part in document["parts"].items():
        error = _error_of(name, part)
        if part["result"] is not None or error is None:
            found += _ROWS[name](part)
        if error is not None:
            found.append(Row(name, "error", error, verdict=FAIL))
    if is_dry:  # it shows that the parts work; tiny states on a CPU do not reach the goals
        return [replace(row, verdict=NONE) if row.goal else row for row in found]
    return found


def plot(found: list[Row], title: str) -> str:
    """Return an SVG image of the numbers that have a goal, as bars beside the line of their goals."""
    bars = [row for row in found if row.of_goal is not None]
    parts = [_text(10, 20, title, "bold")]
    for number, row in enumerate(bars):
        y, share = 40 + 22 * number, min(max(row.of_goal or 0.0, 0.0), _MOST_OF_GOAL)
        color = "#2a7" if share <= 1 else "#c43"
        parts.append(_text(10, y + 12, f"{row.part}: {row.what}"))
        parts.append(f'<rect x="520" y="{y}" width="{100 * share:.1f}" height="15" fill="{color}"/>')
        parts.append(_text(525 + 100 * _MOST_OF_GOAL, y + 12, f"{row.found} ({row.goal})"))
    height = 55 + 22 * len(bars)
    parts.append(f'<line x1="620" x2="620" y1="32" y2="{height - 15}" stroke="#333" stroke-dasharray="4"/>')
    size = f'width="1000" height="{height}" viewBox="0 0 1000 {height}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>' + "".join(parts) + "</svg>\n"


_MOST_OF_GOAL = 2.0  # longest bar of a plot


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-weight="{weight}">{html.escape(text)}</text>'


def _error_of(name: str, part: dict[str, Any]) -> str | None:
    """Return why a part has no results, or not all of them."""
    if error := part.get("error"):
        return error
    status, has_answer = part["status"], part["result"] is not None
    if (has_answer and status in (0, MISSED_GOAL)) or (name in WITHOUT_ANSWER and status == 0):
        return None
    last = part["output"].strip().splitlines()[-1:] or ["no output"]
    return f"status {status}: {last[0][:80]}"


def _judged(part: str, what: str, found: float | None, text: str, goal: float, *, at_least: bool) -> Row:
    sign = "at least" if at_least else "at most"
    if found is None:
        return Row(part, what, "not measured", f"{sign} {goal:g}")
    of_goal = (goal / found if found else math.inf) if at_least else found / goal
    return Row(part, what, text, f"{sign} {goal:g}", PASS if of_goal <= 1 else FAIL, of_goal)


def _tests(part: dict[str, Any]) -> Iterator[Row]:
    last = part["output"].strip().splitlines()[-1:] or [""]
    yield Row("tests", "pytest -m gpu", last[0].strip("= "), "all pass", PASS)


def _stalls(part: dict[str, Any]) -> Iterator[Row]:
    for run in part["result"]["runs"]:
        is_own = run["contestant"] == OWN
        name = "stalls" if is_own else "peers"
        what = f"{run['state']}: {run.get('title', run['contestant'])}"
        if "values" not in run:
            trouble = run.get("error") or f"not installed: {run.get('not_installed')}"
            yield Row(name, what, trouble, verdict=FAIL if is_own else NONE)
            continue
        for row in _stall(name, what, run["values"]):
            yield row if is_own else replace(row, goal="", verdict=NONE)


def _stall(part: str, what: str, values: dict[str, float]) -> Iterator[Row]:
    blocked_s = values["blocked_s"]
    text = f"{blocked_s * 1e3:.2f} ms"
    yield _judged(part, f"{what} blocks, s", blocked_s, text, BLOCKED_S, at_least=False)
    if "lost_s" in values:
        lost = values["lost_s"] / values["train_copy_s"]
        yield _judged(part, f"{what} loses, copies", lost, f"{lost:.2f}", LOST_COPIES, at_least=False)
    yield Row(part, f"{what} is durable after", f"{values['durable_s']:.2f} s")
    for key, limit in (("near_memcpy_s", "copy to the host"), ("near_write_s", "raw write")):
        if key in values:
            yield Row(part, f"{what}: {limit} beside it", f"{values[key]:.3f} s")
    if "near_read_s" in values and "near_memcpy_s" in values:
        share = max(values["near_read_s"], values["near_memcpy_s"]) / values["load_cold_s"]
        restored = f"{what} restores, share of the slower of disk and copy"
        yield _judged(part, restored, share, f"{share:.2f}", RESTORE_SHARE, at_least=True)


def _overlap(part: dict[str, Any]) -> Iterator[Row]:
    found = part["result"]
    beside, pinned, queued_s = found["overlapped_share"], found["pinned_share"], found["queued_blocked_s"]
    yield Row("overlap", "copies from the device beside kernels", _percent(beside))
    what = "copies from the device into page-locked memory"
    yield _judged("overlap", what, pinned or 0.0, _percent(pinned), PINNED_SHARE, at_least=True)
    yield Row("overlap", "optimizer steps waited for the copy", f"{found['waited_s'] * 1e3:.1f} ms")
    text = "" if queued_s is None else f"{queued_s * 1e3:.2f} ms"
    what = "save() behind queued kernels blocks, s"
    yield _judged("overlap", what, queued_s, text, BLOCKED_S, at_least=False)


def _percent(share: float | None) -> str:
    return "no copies" if share is None else f"{share:.0%}"


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
    "peers": _stalls,
    "overlap": _overlap,
    "restore": _restore,
    "fit": _fit,
    "shard": _shard,
    "compile": _compile,
    "tune": _tune,
}
