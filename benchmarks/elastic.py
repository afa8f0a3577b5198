"""Pauses of a training that loses one of four hosts, continues on three, and takes the host in again.

Hosts are network namespaces with a torchrun each, see `campaigns/fewer_hosts.py`, which also checks what was
trained. `lost` is the time from the kill of a host until the next step on three; `back` is the time between
the last step on three and the first one on four.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

from campaigns.fewer_hosts import run_once  # noqa: E402
from holdfast.cli.demo.hosts import isolated, make_network  # noqa: E402

NAMES = ("lost_s", "back_s")
WAYS = {"torchrun": False, "torchrun with standbys": True}
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="lost hosts of each way")
    parser.add_argument("--ranks-each", type=int, default=1, help="ranks of each host")
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/elastic_<hardware>_<date>.json")
    parser.add_argument("--inside", action="store_true", help="this process may make hosts")
    options = parser.parse_args()
    if not options.inside:
        return subprocess.run(isolated([sys.executable, __file__, "--inside", *sys.argv[1:]])).returncode
    make_network()
    folder = options.dir.resolve() / f"elastic-{random.randrange(10**9)}"  # pids repeat in a namespace
    folder.mkdir(parents=True)
    facts, runs = machine.describe(folder), list[dict[str, Any]]()
    try:
        for number in range(options.rounds):
            for way, has_standbys in WAYS.items():
                place, load = folder / f"{number}-{has_standbys}", os.getloadavg()[0]
                lost, back = run_once(place, number, ranks_each=options.ranks_each, has_standbys=has_standbys)
                values = {"lost_s": lost.seconds, "back_s": back.pause_s, "load": load}
                details = {"lost": dataclasses.asdict(lost), "back": dataclasses.asdict(back)}
                runs.append({"way": way, "round": number, **values, **details})
                console.print(json.dumps(runs[-1]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = {
        f"{way}, {name}": statistics.median(run[name] for run in runs if run["way"] == way)
        for way in WAYS
        for name in NAMES
    }
    path = options.out or machine.results_path("elastic", facts)
    document = {"machine": facts, "rounds": options.rounds, "medians": medians, "runs": runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"{json.dumps(medians)}\nwrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
