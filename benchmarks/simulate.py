"""Expected goodput of a run on thousands of hosts, with and without copies on peers and standbys.

Published failures are simulated against one run: at Llama 3's rate and causes for 16,384 GPUs, and
InfiniteHBD's trace, its rate brought to as many GPUs. Each failure costs the steps since the newest step
that survives it, the start, and the restore. The constants are those that the other benchmarks have
measured on this machine, or have their source beside them. The same simulation of the replayed traces is
compared with the replays themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
from drawing import Diagram
from replaying import collection
from replaying.schedule import Trace, Trouble, scale
from rich.console import Console
from table import RESULTS, newest

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "pictures" / "goodput.svg"
HOSTS = 2048  # of 8 GPUs, as Llama 3's
INFINITEHBD_SERVERS = 400
INTERVALS_S = (60, 120, 300, 600, 1200, 1800, 3600)
BYTES_PER_RANK = 405e9 * 12 / (8 * HOSTS)  # weights of 405 billion parameters and AdamW's moments, in fp32
HOME_BYTES_PER_S = 2e12 / (8 * HOSTS)  # of each rank: Llama 3's storage, 2 TB/s together
HOME_LAG_S = BYTES_PER_RANK / HOME_BYTES_PER_S
MEMORY_EVERY_S = 30.0  # from save to save; home has fewer
JOIN_S = 60.0  # detection, new host and process groups at that size: not measured here, and the same for all
CURVES = {"neither": "undisturbed", "standbys": "wire mark", "peers": "run kill", "peers and standbys": "run"}
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


@dataclass(frozen=True, slots=True)
class Setting:
    """A run, as far as a failure needs it. Times are in seconds."""

    save_every: float  # in the memory of the host, and on peers if there are any
    home_every: float
    save_cost: float  # of training, per save
    home_lag: float  # from the step to its durable save in home
    memory_lag: float  # to its save in the memory of the host
    peer_lag: float | None  # to its copy on a peer; None without peers
    start: float  # from the kill to the first step, without the restore
    start_of_new_host: float  # the same, if a host was replaced
    restore: float  # from home; from memory it is part of the start
    join: float


def simulate(trace: Sequence[tuple[float, bool]], end_s: float, setting: Setting) -> float:
    """Return the share of the time that became useful steps.

    Args:
        trace: failures in order: their time, and whether a host is lost with its memory.
    """
    useful_s, resumed_s = 0.0, 0.0  # useful when it was last resumed, and that moment
    rate = 1 - setting.save_cost / setting.save_every
    for at_s, loses_host in trace:
        if at_s >= resumed_s:
            lag_s = setting.memory_lag if not loses_host else setting.peer_lag
            from_home = lag_s is None
            kept_s = max(0.0, at_s - resumed_s - (setting.home_lag if lag_s is None else lag_s))
            every_s = setting.home_every if from_home else setting.save_every
            useful_s += kept_s // every_s * every_s * rate
        else:  # in the start after another failure, which nothing has been saved since
            from_home = loses_host and setting.peer_lag is None
        start_s = setting.start_of_new_host if loses_host else setting.start
        resumed_s = at_s + setting.join + start_s + (setting.restore if from_home else 0.0)
    return (useful_s + max(0.0, end_s - resumed_s) * rate) / end_s


def failures(trace: Trace, factor: float = 1.0) -> tuple[list[tuple[float, bool]], float]:
    """Return the failures of a trace `factor` times as often, and its end, in seconds."""
    found = [
        (one.at_h * 3600 / factor, one.trouble in (Trouble.NODE, Trouble.DAMAGE, Trouble.NOTICE))
        for one in trace.interruptions
    ]
    return found, trace.hours * 3600 / factor


def settings(start_s: dict[str, float], interval_s: float) -> dict[str, Setting]:
    """Return the run in each way, with a save in home every so many seconds."""
    plain = Setting(
        save_every=MEMORY_EVERY_S,
        home_every=interval_s,
        save_cost=0.03,
        home_lag=HOME_LAG_S,
        memory_lag=1.0,
        peer_lag=None,
        start=start_s["cold"],
        start_of_new_host=start_s["cold"],
        restore=HOME_LAG_S,
        join=JOIN_S,
    )
    with_peers = replace(plain, peer_lag=BYTES_PER_RANK / 5e9)  # 40 Gbit/s of each rank
    with_standby = replace(plain, start=start_s["warm"], start_of_new_host=start_s["warm"])
    return {
        "neither": plain,
        "standbys": with_standby,
        "peers": with_peers,
        "peers and standbys": replace(with_peers, start=start_s["warm"], start_of_new_host=start_s["warm"]),
    }


def check(goodput: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the goodput of each replay beside that of its simulation."""
    traces = {one.name: one for one in collection.read_all(None)}
    found = []
    for run in goodput["runs"]:
        if run["state"] not in traces or not run["pauses"]:
            continue
        part = traces[run["state"]].window(run["round"], goodput["count"])
        schedule = scale(part, goodput["mtbf_s"], max_outage_s=1.0)
        known = goodput["undisturbed"][str(traces[run["state"]].num_nodes)]
        step_s, own = known["none"]["step_s"], known[run["contestant"]]
        start_s = statistics.mean(sum(pause.values()) for pause in run["pauses"])
        save_every = own["every"] * step_s
        cost = max(0.0, (own["step_s"] - step_s) * 20)  # of a save every 20 steps
        is_async = run["contestant"] in ("holdfast", "standby")
        setting = Setting(
            save_every, save_every, cost, 0.5, 0.2 if is_async else 0.5, 0.5, start_s, start_s, 0.0, 0.0
        )
        events = [(event.at_s, event.trouble is Trouble.NODE) for event in schedule.events]
        predicted = simulate(events, schedule.length_s, setting) * schedule.length_s / schedule.available_s
        found.append(
            {
                "trace": run["state"],
                "contestant": run["contestant"],
                "replayed": run["values"]["goodput"],
                "simulated": predicted,
            }
        )
    return found


def main() -> int:
    """Simulate, and write the results and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default results/simulated_<hardware>_<date>.json")
    options = parser.parse_args()
    standby = newest(RESULTS, "standby")[0]["medians"]
    start_s = {"cold": standby["torchrun"], "warm": standby["torchrun with a standby"]}
    traces = {one.name: one for one in collection.read_all(None)}
    cases = {
        "Llama 3 causes": failures(traces["Llama 3 causes"]),
        "InfiniteHBD": failures(traces["InfiniteHBD"], HOSTS / INFINITEHBD_SERVERS),
    }
    rows = [
        {"trace": name, "interval_s": interval_s, "way": way, "goodput": simulate(*case, setting)}
        for name, case in cases.items()
        for interval_s in INTERVALS_S
        for way, setting in settings(start_s, interval_s).items()
    ]
    compared = check(newest(RESULTS, "goodput")[0])
    facts = machine.describe(HERE)
    constants = {
        "hosts": HOSTS,
        "start_s": start_s,
        "join_s": JOIN_S,
        "home_lag_s": HOME_LAG_S,
        "bytes_per_rank": BYTES_PER_RANK,
        "failures_per_day": {name: len(case[0]) / (case[1] / 86400) for name, case in cases.items()},
    }
    path = options.out or machine.results_path("simulated", facts)
    document = {"machine": facts, "constants": constants, "rows": rows, "checked": compared}
    path.write_text(json.dumps(document, indent=1) + "\n")
    PICTURE.write_text(draw(rows, "Llama 3 causes"))
    for row in rows:
        console.print(f"{row['trace']:16}{row['interval_s']:6} s  {row['way']:20}{row['goodput']:.4f}")
    for one in compared:
        console.print(f"{one['trace']:16}{one['contestant']:12}{one['replayed']:.3f}  {one['simulated']:.3f}")
    console.print(f"wrote {path}")
    return 0


def draw(rows: list[dict[str, Any]], trace: str) -> str:
    """Return the picture: goodput by interval, a curve for each way."""
    width, height, left, right, top, bottom = 760, 330, 64, 520, 52, 270
    picture = Diagram(width, height, f"Simulated goodput of 16,384 GPUs by the interval of saves: {trace}")
    picture.text(16, 24, "Simulated goodput, 16,384 GPUs, a failure every 3 hours", "title")
    mine = [row for row in rows if row["trace"] == trace]
    least = int(min(row["goodput"] for row in mine) * 50) / 50
    for number in range(round((1 - least) * 50) + 1):
        share = least + number / 50
        y = bottom - (share - least) / (1 - least) * (bottom - top)
        picture.line(left, y, right, y, "grid")
        picture.text(left - 8, y + 4, f"{share:.2f}", "soft", anchor="end")
    for number, interval_s in enumerate(INTERVALS_S):
        x = left + number * (right - left) / (len(INTERVALS_S) - 1)
        label = f"{interval_s} s" if interval_s < 60 else f"{interval_s // 60} min"
        picture.text(x, bottom + 20, label, "soft", anchor="middle")
    picture.text(
        (left + right) / 2,
        bottom + 44,
        "time between two saves in home; one in memory every 30 s",
        anchor="middle",
    )
    for row, (way, kind) in enumerate(CURVES.items()):
        found = [one["goodput"] for one in mine if one["way"] == way]
        across, down = (right - left) / (len(found) - 1), (bottom - top) / (1 - least)
        points = [(left + i * across, bottom - (share - least) * down) for i, share in enumerate(found)]
        picture.curve(points, kind)
        y = top + 24 * row
        picture.line(right + 16, y - 4, right + 44, y - 4, kind)
        picture.text(right + 52, y, way)
    return picture.svg()


if __name__ == "__main__":
    sys.exit(main())
