"""Time from `import holdfast` to the first byte of a checkpoint, with nothing of either in the page cache."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
from goals import FIRST_BYTE_S
from intervals import interval_of
from pagecache import evict
from rich.console import Console
from rich.table import Table
from source_path import environment
from startup import make_home

HERE = Path(__file__).resolve().parent
"""Goal of the time beyond `import torch`."""
FILES = """
import json, os
maps = [line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/" in line]
modules = [vars(one) for one in list(sys.modules.values()) if hasattr(one, "__dict__")]
names = [*maps, *(one.get(name) for one in modules for name in ("__file__", "__cached__"))]
print(json.dumps(sorted({one for one in names if type(one) is str and os.path.isfile(one)})))
"""
TORCH = "import sys, time, torch\n"
READ = """
began = time.perf_counter()
import holdfast
checkpoint = holdfast.open(sys.argv[1])
first = checkpoint[next(iter(checkpoint.keys()))].flatten()[0].item()
took = time.perf_counter() - began
"""
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Measure cold and warm starts in turns, and return 1 if the cold ones miss the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench", help="where the home is written")
    parser.add_argument("--out", type=Path, help="default results/firstbyte_<hardware>_<date>.json")
    options = parser.parse_args()
    options.dir.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        home = Path(folder) / "home"
        make_home(home)
        files = _files_beyond_torch(home)
        runs = [_round(number, home, files) for number in range(options.rounds)]
    return _report(options, runs, num_files=len(files))


def _files_beyond_torch(home: Path) -> list[Path]:
    """Return the files that a start with Holdfast reads, and one that only imports torch does not."""
    plain, whole = (json.loads(_run(code + FILES, home)[0]) for code in (TORCH, TORCH + READ))
    return [Path(name) for name in sorted(set(whole) - set(plain))]


def _round(number: int, home: Path, files: list[Path]) -> dict[str, float]:
    """Start with torch alone, and twice with Holdfast: with nothing and with everything cached."""
    _, torch_s = _run(TORCH, home)
    shares = [evict(path) for path in (*files, home)]
    cold, cold_process_s = _run(TORCH + READ + "print(took)", home)
    warm, warm_process_s = _run(TORCH + READ + "print(took)", home)
    run = {
        "round": number,
        "cold_s": float(cold),
        "warm_s": float(warm),
        "cold_beyond_s": cold_process_s - torch_s,
        "warm_beyond_s": warm_process_s - torch_s,
        "torch_s": torch_s,
        "cached_share": statistics.fmean(shares),
    }
    console.print("  ".join(f"{key} {value:.3f}" for key, value in run.items()))
    return run


def _run(code: str, home: Path) -> tuple[str, float]:
    """Run a program in a process of its own; return its output and the seconds of the whole process."""
    began = time.perf_counter()
    command = [sys.executable, "-c", code, str(home)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    return done.stdout, time.perf_counter() - began


def _report(options: argparse.Namespace, runs: list[dict[str, float]], *, num_files: int) -> int:
    facts = machine.describe(options.dir)
    names = {
        "cold_s": "from import holdfast to the first byte, nothing cached",
        "warm_s": "the same, everything cached",
        "cold_beyond_s": "whole process, beyond one that imports torch, nothing cached",
        "warm_beyond_s": "the same, everything cached",
        "torch_s": "whole process that imports torch",
    }
    medians = {key: statistics.median(run[key] for run in runs) for key in names}
    table = Table("", "estimate", "95 % interval", title=f"{num_files} files besides torch's and the home")
    for key, name in names.items():
        found = interval_of([run[key] for run in runs])
        table.add_row(name, f"{found.estimate:.3f} s", f"{found.low:.3f} to {found.high:.3f} s")
    console.print(table)
    document: dict[str, Any] = {"machine": facts, "files": num_files, "medians": medians, "runs": runs}
    path = options.out or machine.results_path("firstbyte", facts)
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"goal: at most {FIRST_BYTE_S} s; wrote {path}")
    return int(medians["cold_s"] > FIRST_BYTE_S)


if __name__ == "__main__":
    sys.exit(main())
