"""The columns of the result tables, as text; run.py shows them and table.py writes them. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comparison import MAX_OTHERS
from goals import Verdict
from intervals import Interval
from results import Results, Spread

NONE = "-"
JUDGED = "holdfast"
Cell = Callable[[Results, str, str], str]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading and what stands in it for a state and a contestant."""

    heading: str
    cell: Cell


def rows(results: Results, state: str) -> list[list[str]]:
    """One row of cells for each contestant on a state."""
    found = []
    for contestant in results.contestants(state):
        title = results.of(state, contestant)[0].get("title", contestant)
        if trouble := results.trouble(state, contestant):
            found.append([title, trouble] + [NONE] * (len(COLUMNS) - 1))
        else:
            found.append([title, *(column.cell(results, state, contestant) for column in COLUMNS)])
    return found


def rows_in_short(results: Results, state: str) -> list[list[str]]:
    """Medians of what most readers ask, one row for each contestant that has them, and the raw limits."""
    found = [["limits: a copy in memory, raw writes and raw reads", *_short_limits(results, state)]]
    for contestant in results.contestants(state):
        if not results.trouble(state, contestant):
            title = results.of(state, contestant)[0].get("title", contestant)
            found.append([title, *(column.cell(results, state, contestant) for column in SHORT)])
    return found


def _short_limits(results: Results, state: str) -> list[str]:
    spreads = [_limit(results, state, key) for key in ("memcpy_s", "write_s", "read_s")]
    copy, write, read = [NONE if one is None else _median(one) for one in spreads]
    return [copy, _lost_in_seconds(results, state, "limits"), write, read, NONE]


def _limit(results: Results, state: str, key: str) -> Spread | None:
    """Return a raw limit as it was between Holdfast's own saves and loads, if it was measured there."""
    return results.spread(state, JUDGED, f"near_{key}") or results.spread(state, "limits", key)


def limits(results: Results, state: str) -> str:
    """The raw limits of a state in one line."""
    spreads = {key: _limit(results, state, key) for key in ("memcpy_s", "write_s", "read_s")}
    size = results.spread(state, "limits", "state_bytes")
    if size is None:
        return "raw limits: not measured"
    parts = [f"state {_bytes(size.median)}"]
    labels = {"memcpy_s": "memcpy", "write_s": "raw write + fsync", "read_s": "raw read"}
    for key, label in labels.items():
        if (spread := spreads[key]) is not None:
            rate = size.median / spread.median / 1e9
            parts.append(f"{label} {seconds(spread)} ({rate:.2f} GB/s)")
    return "; ".join(parts)


def verdict(found: Verdict) -> tuple[str, str, str, str, str]:
    """Goal, bound, value with its range, day, and the outcome; a goal not measured has its command."""
    goal, value = found.goal, found.found
    bound = f"{'at least' if goal.at_least else 'at most'} {goal.bound:g} {goal.unit}"
    if value is None:
        return goal.what, bound, NONE, NONE, f"not measured: `{goal.command}`"
    spread = value.spread
    span = f" [{spread.least:.3g}..{spread.most:.3g}]" if spread.least < spread.most else ""
    text = f"{spread.median:.3g}{span} {goal.unit}"
    outcome = {True: "pass", False: "missed", None: "undecided: the interval contains the goal"}[found.passed]
    if value.others > MAX_OTHERS:
        outcome += f"; other programs used {value.others:.1f} processors"
    return goal.what, bound, text, value.date, outcome


def seconds(spread: Spread) -> str:
    """Median and range with a fitting unit."""
    unit, factor = ("ms", 1e3) if abs(spread.median) < 0.1 else ("s", 1.0)
    low, mid, high = (value * factor for value in (spread.least, spread.median, spread.most))
    digits = 0 if abs(mid) >= 100 else 1 if abs(mid) >= 10 else 2
    return f"{mid:.{digits}f} [{low:.{digits}f}..{high:.{digits}f}] {unit}"


def facts(machine: dict[str, Any], rounds: int | None) -> str:
    """The machine and the day in one line; without `rounds` for a table of medians alone."""
    what = "medians"
    if rounds is not None:
        what = f"median [least..greatest] of {rounds} round{'' if rounds == 1 else 's'}"
    return f"{hardware(machine)}, torch {machine['packages']['torch']}, {machine['date'][:10]}; {what}"


def hardware(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['filesystem']}, Linux {machine['kernel']}"
    )


def _time(key: str) -> Cell:
    def cell(results: Results, state: str, contestant: str) -> str:
        spread = results.spread(state, contestant, key)
        return seconds(spread) if spread else NONE

    return cell


def _durable(results: Results, state: str, contestant: str) -> str:
    durable = _time("durable_s")(results, state, contestant)
    if results.of(state, contestant)[0].get("syncs", True):
        return durable
    return f"{durable} (without fsync, as it comes: {_time('complete_s')(results, state, contestant)})"


def _lost(results: Results, state: str, contestant: str) -> str:
    lost = results.training_lost_copies(state, contestant)
    if lost is None:
        return NONE
    seconds_lost = _lost_in_seconds(results, state, contestant)
    return f"{lost.estimate:.1f} [{lost.low:.1f}..{lost.high:.1f}] copies ({seconds_lost})"


def _lost_in_seconds(results: Results, state: str, contestant: str) -> str:
    return _interval(results.training_lost(state, contestant))


def _lost_cpu(results: Results, state: str, contestant: str) -> str:
    return _interval(results.training_cpu(state, contestant))


def _interval(found: Interval | None) -> str:
    if found is None:
        return NONE
    return f"{found.estimate:.2f} [{found.low:.2f}..{found.high:.2f}] s"


def training_lost(results: Results, state: str, machine: dict[str, Any]) -> str:
    """Return the cost of a save in a training, as a sentence."""
    lost, cpu = results.training_lost_copies(state, JUDGED), results.training_cpu(state, JUDGED)
    if lost is None or cpu is None:
        return "Training lost per save: not measured with the present method (`make bench`)."
    size = results.spread(state, JUDGED, "state_bytes")
    others = statistics.median(one.others for one in results.comparisons(state, JUDGED))
    busy = f", while other programs used {others:.1f} processors" if others > MAX_OTHERS else ""
    return (
        f"A save of {_bytes(size.median) if size else state} slows a training on all cores by "
        f"{_lost_in_seconds(results, state, JUDGED)}, as long as {lost.estimate:.1f} "
        f"[{lost.low:.1f}..{lost.high:.1f}] copies of the state in memory take, and uses "
        f"{_interval(cpu)} of processor "
        f"time (in brackets the {lost.confidence:.0%} confidence interval, of {lost.num_pairs} saves{busy}; "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]})."
        f"{_lost_to_raw_write(results, state)}"
    )


def _lost_to_raw_write(results: Results, state: str) -> str:
    if results.training_lost(state, "limits") is None:
        return ""
    lost = _lost_in_seconds(results, state, "limits")
    count = len(results.comparisons(state, "limits"))
    return (
        " A raw write of as many bytes, without a copy and without hashes, slows the same training by "
        f"{lost} (of {count} writes)."
    )


def _load(key: str) -> Cell:
    def cell(results: Results, state: str, contestant: str) -> str:
        if not results.of(state, contestant)[0].get("own_load", True):
            return "same load"
        return _time(key)(results, state, contestant)

    return cell


def _cold_load(results: Results, state: str, contestant: str) -> str:
    """Seconds, and the share of the speed of the raw reads just before, if those were measured."""
    text = _load("load_cold_s")(results, state, contestant)
    share = results.paired(
        state, contestant, contestant, lambda own, _: own["near_read_s"] / own["load_cold_s"]
    )
    return text if share is None else f"{text}, {share.median:.2f} of raw reads"


def _memory(results: Results, state: str, contestant: str) -> str:
    extra = results.spread(state, contestant, "extra_bytes")
    size = results.spread(state, contestant, "state_bytes")
    helper = results.spread(state, contestant, "helper_bytes")
    if extra is None or size is None or helper is None:
        return NONE
    text = f"{extra.median / size.median:.2f} states ({extra.median / 1e6:.0f} MB)"
    return f"{text}, {helper.median / 1e6:.0f} MB of it helpers'" if helper.median > 1e6 else text


def _median(spread: Spread) -> str:
    return seconds(spread).partition(" ")[0] + " " + seconds(spread).rpartition(" ")[2]


def _short(cell: Cell) -> Cell:
    """The same without the range: what stands before a bracket, and the unit after it."""

    def short(results: Results, state: str, contestant: str) -> str:
        text = re.sub(r" \[[^\]]*\]", "", cell(results, state, contestant))
        return text.partition(" (")[0]

    return short


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


COLUMNS = (
    Column("the call blocks", _time("blocked_s")),
    Column("copied after", _time("staged_s")),
    Column("step() waits", _time("train_wait_s")),
    Column("training lost", _lost),
    Column("processor time", _lost_cpu),
    Column("durable after", _durable),
    Column("load, cache dropped", _cold_load),
    Column("load, cached", _load("load_warm_s")),
    Column("extra memory", _memory),
)
SHORT = (
    Column("save() blocks", _short(_time("blocked_s"))),
    Column("training time lost", _lost_in_seconds),
    Column("durable after", _short(_durable)),
    Column("load, cold cache", _short(_cold_load)),
    Column("extra memory", _short(_memory)),
)
