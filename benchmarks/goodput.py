"""Share of the time that becomes useful steps, while real failure traces are replayed against a job.

Each trace is cut into parts with a few interruptions each, and scaled in time so that the job could run for
`--mtbf-s` seconds per interruption. All tools train under the same interruptions, one after another.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import columns
import machine
import replayed
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from replaying import collection  # noqa: E402
from replaying.replay import Replay  # noqa: E402
from replaying.schedule import Schedule, Trace, scale  # noqa: E402
from replaying.training import TOOLS, tool_class  # noqa: E402

MAX_OUTAGE_S = 1.0
UNDISTURBED = 160  # steps
FIRST_EVERY = 20  # steps from save to save, until the cost of one is known
LEAST_COST_S = 0.03  # less is not told from the noise of such a run
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Replay, and write the results; the exit status is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mtbf-s", type=float, default=15.0, help="seconds per interruption")
    parser.add_argument("--count", type=int, default=3, help="interruptions of a replay")
    parser.add_argument("--rounds", type=int, default=1, help="parts of each trace")
    parser.add_argument(
        "--tools", nargs="+", choices=TOOLS, default=["standby", "holdfast", "torch.save", "dcp"]
    )
    parser.add_argument("--traces", nargs="+", help="beginnings of names; default: all that are there")
    parser.add_argument(
        "--skypilot", type=Path, help="folder with SkyPilot's spot-traces, which have no licence"
    )
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/goodput_<hardware>_<date>.json")
    options = parser.parse_args()
    folder = options.dir.resolve() / f"goodput-{os.getpid()}"
    folder.mkdir(parents=True)
    os.environ |= {"HOLDFAST_PREEMPTION": "none", "HOLDFAST_STATE": str(folder / "state")}
    facts = machine.describe(folder)
    traces = [
        one
        for one in collection.read_all(options.skypilot)
        if not options.traces or one.name.lower().startswith(tuple(options.traces))
    ]
    bench = Bench(folder, options.mtbf_s)
    tools = [name for name in options.tools if importlib.util.find_spec(tool_class(name).module)]
    try:
        for trace in traces:
            bench.calibrate(trace.num_nodes, tools)
        for number in range(options.rounds):
            for position, trace in enumerate(traces):
                turn = (number + position) % len(tools)
                bench.replay(trace, number, options.count, tools[turn:] + tools[:turn])
    except (KeyboardInterrupt, TimeoutError):
        traceback.print_exc()
        console.print("ended early; the replays so far are kept")
        report(options, facts, bench)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report(options, facts, bench)


class Bench:
    """Replays in a folder, and their results."""

    def __init__(self, folder: Path, mtbf_s: float) -> None:
        self._folder, self._mtbf_s, self._number = folder, mtbf_s, 0
        self.undisturbed: dict[int, dict[str, dict[str, float]]] = {}  # nodes, tool
        self.runs: list[dict[str, Any]] = []

    def calibrate(self, num_nodes: int, tools: list[str]) -> None:
        """Measure undisturbed runs: the step time without saves, and the cost of a save of each tool."""
        if num_nodes in self.undisturbed:
            return
        step_s = self._step_s("none", num_nodes)
        found = self.undisturbed[num_nodes] = {"none": {"step_s": step_s}}
        for tool in [one for one in tools if one != "standby"]:
            slowed_s = self._step_s(tool, num_nodes)
            cost_s = max(LEAST_COST_S, (slowed_s - step_s) * FIRST_EVERY)
            found[tool] = {"step_s": slowed_s, "cost_s": cost_s, "every": every(cost_s, self._mtbf_s, step_s)}
            console.print(json.dumps({"nodes": num_nodes, "tool": tool, **found[tool]}))
        if "standby" in tools:  # its processes take time of the first steps only
            found["standby"] = found["holdfast"]

    def _step_s(self, tool: str, num_nodes: int) -> float:
        replay = self._start(tool, num_nodes, FIRST_EVERY, UNDISTURBED + FIRST_EVERY)
        try:
            replay.wait_ended()
            (progress,) = replay.progress()
        finally:
            replay.close()
        steps = progress.steps[FIRST_EVERY:]
        return (steps[-1][1] - steps[0][1]) / (len(steps) - 1)

    def replay(self, trace: Trace, number: int, count: int, tools: list[str]) -> None:
        """Replay one part of a trace with every tool."""
        if (number + 1) * count > len(trace.interruptions):
            return
        part = trace.window(number, count)
        schedule = scale(part, self._mtbf_s, max_outage_s=MAX_OUTAGE_S)
        for tool in tools:
            self.runs.append(self._run(trace, schedule, number, tool))
            console.print(json.dumps(self.runs[-1]))

    def _run(self, trace: Trace, schedule: Schedule, number: int, tool: str) -> dict[str, Any]:
        known = self.undisturbed[trace.num_nodes]
        replay = self._start(tool, trace.num_nodes, int(known[tool]["every"]), None)
        load = os.getloadavg()[0]
        try:
            found = replay.run(schedule, seed=number)
        finally:
            replay.close()
        useful_s = found["useful_steps"] * known["none"]["step_s"]
        return {
            "state": trace.name,
            "contestant": tool,
            "title": tool_class(tool).title,
            "round": number,
            "troubles": [event.trouble.value for event in schedule.events],
            "load": load,
            "values": {
                "goodput": useful_s / schedule.available_s,
                "cost_s": (schedule.available_s - useful_s) / len(schedule.events),
                "every": known[tool]["every"],
                "hour_s": schedule.hour_s,
                "available_s": schedule.available_s,
                **{key: found[key] for key in ("useful_steps", "lost_steps", "restarts")},
            },
            "pauses": found["pauses"],
        }

    def _start(self, tool: str, num_nodes: int, every: int, steps: int | None) -> Replay:
        self._number += 1
        folder = self._folder / str(self._number)
        return Replay(folder, tool, num_nodes=num_nodes, every=every, steps=steps)


def every(cost_s: float, mtbf_s: float, step_s: float) -> int:
    """Return the steps from save to save with the least loss, after Young's formula."""
    return max(1, round(math.sqrt(2 * cost_s * mtbf_s) / step_s))


def report(options: argparse.Namespace, facts: dict[str, Any], bench: Bench) -> int:
    """Write the results; return 1 if a goal is missed."""
    traces = {one.name: one for one in collection.read_all(options.skypilot)}
    document = {
        "machine": facts,
        "rounds": options.rounds,
        "mtbf_s": options.mtbf_s,
        "count": options.count,
        "load_after": os.getloadavg()[0],
        "traces": {
            name: {"mtbf_h": one.mtbf_h, "share": one.share, "hours": one.hours, "nodes": one.num_nodes}
            for name, one in traces.items()
            if any(run["state"] == name for run in bench.runs)
        },
        "undisturbed": bench.undisturbed,
        "runs": bench.runs,
    }
    path = options.out or machine.results_path("goodput", facts)
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path} at {time.strftime('%H:%M:%S')}")
    verdicts = replayed.judge(document)
    for one in verdicts:
        console.print(" | ".join(columns.verdict(one)))
    return 0 if all(one.passed for one in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
