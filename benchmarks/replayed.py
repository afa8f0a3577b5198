"""Tables of replayed traces as rows of text, and their goals. Pure."""

from __future__ import annotations

import statistics
from typing import Any

from goals import Found, Goal, Verdict
from replaying.progress import PARTS
from results import Results, Spread

OURS = ("standby", "holdfast")
GOAL = 0.97
"""Goodput of the time that a trace leaves."""
HEADINGS = (
    "",
    "goodput of the time left",
    "of all time",
    "s lost per interruption",
    "steps done again",
    "restarts",
    "save every",
)
TRACE_HEADINGS = (
    "trace",
    "nodes",
    "hours between interruptions",
    "time left",
    "replayed, s per hour",
    "replayed troubles",
)
PAUSE_HEADINGS = ("pauses, medians", "nodes", *PARTS)

Document = dict[str, Any]


def rows(document: Document) -> list[list[str]]:
    """One row for each trace, in bold, and one below it for each tool."""
    results, found = Results(tuple(document["runs"])), []
    for trace in results.states():
        share = document["traces"][trace]["share"]
        found.append([f"**{trace}**", *[""] * (len(HEADINGS) - 1)])
        tools = sorted(results.contestants(trace), key=lambda name: name not in OURS)
        found += [_row(results, trace, tool, share) for tool in tools]
    return found


def _row(results: Results, trace: str, tool: str, share: float) -> list[str]:
    runs = results.of(trace, tool)

    def total(key: str) -> float:
        return sum(run["values"][key] for run in runs)

    goodput = results.spread(trace, tool, "goodput")
    assert goodput is not None, "each run has values"
    cost = results.spread(trace, tool, "cost_s")
    assert cost is not None, "each run has values"
    return [
        runs[0]["title"],
        _spread(goodput, 3),
        f"{goodput.median * share:.3f}",
        _spread(cost, 2),
        f"{total('lost_steps') / max(1, total('restarts')):.1f} per restart",
        f"{total('restarts'):.0f}",
        f"{statistics.median(run['values']['every'] for run in runs):.0f} steps",
    ]


def trace_rows(document: Document) -> list[list[str]]:
    """One row for each trace: its own numbers, and how it was replayed."""
    found = []
    for name, trace in document["traces"].items():
        runs = [run for run in document["runs"] if run["state"] == name]
        scales = [run["values"]["hour_s"] for run in runs]
        kinds = dict.fromkeys(trouble for run in runs for trouble in run["troubles"])
        found.append(
            [
                name,
                str(trace["nodes"]),
                f"{trace['mtbf_h']:.2f}",
                f"{trace['share']:.3f}",
                f"{min(scales):.3g}..{max(scales):.3g}" if min(scales) != max(scales) else f"{scales[0]:.3g}",
                ", ".join(kinds),
            ]
        )
    return found


def pause_rows(document: Document) -> list[list[str]]:
    """One row for each tool and number of nodes: the median seconds of each part of a pause."""
    found = []
    nodes = {name: trace["nodes"] for name, trace in document["traces"].items()}
    for number in sorted(set(nodes.values())):
        runs = [run for run in document["runs"] if nodes[run["state"]] == number]
        for title in dict.fromkeys(run["title"] for run in runs):
            pauses = [pause for run in runs if run["title"] == title for pause in run["pauses"]]
            cells = (
                [f"{statistics.median(pause[part] for pause in pauses):.2f} s" for part in PARTS]
                if pauses
                else []
            )
            found.append([title, str(number), *cells])
    return found


def judge(document: Document) -> list[Verdict]:
    """Return the goals of each trace: enough goodput, and more than each peer in the same round."""
    results, found = Results(tuple(document["runs"])), []
    for trace in results.states():
        ours = next(one for one in OURS if one in results.contestants(trace))
        goodput = results.spread(trace, ours, "goodput")
        found.append(_verdict(f"{trace}: goodput of the time left", GOAL, "", goodput))
        for peer in (one for one in results.contestants(trace) if one not in OURS):
            ahead = results.paired(trace, ours, peer, _ratio)
            found.append(_verdict(f"{trace}: goodput, compared with {peer}", 1.0, "times", ahead))
    return found


def _verdict(what: str, bound: float, unit: str, spread: Spread | None) -> Verdict:
    goal = Goal(what, bound, unit, "benchmarks/goodput.py", at_least=True)
    return Verdict(goal, None if spread is None else Found(spread))


def _ratio(ours: dict[str, float], theirs: dict[str, float]) -> float:
    return ours["goodput"] / max(theirs["goodput"], 1e-9)


def _spread(spread: Spread, digits: int) -> str:
    if spread.least == spread.most:
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} [{spread.least:.{digits}f}..{spread.most:.{digits}f}]"
