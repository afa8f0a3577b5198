"""Everything that is measured on a GPU, part by part, in processes of their own and within a time budget."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS), str(HERE)]

import machine  # noqa: E402 - the folder above is not a package
import summary  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a command with its time limit. It writes JSON to a file that is appended, if `writes`."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    writes: bool = True


def main() -> int:
    """Run the parts in order; the exit status is 1 if one failed or a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: dry run, tiny states")
    parser.add_argument("--only", metavar="PARTS", help="comma-separated parts")
    parser.add_argument("--budget", type=float, default=460.0, metavar="S", help="seconds for all parts")
    parser.add_argument("--dir", type=Path, default=ROOT / ".bench", help="where checkpoints are written")
    parser.add_argument("--out", type=Path, help="results file; default results/gpu_<device>_<date>.json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("This machine has no CUDA device. For a dry run: benchmarks/gpu/run.sh --device cpu")
        return 2
    options.dir.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(options.dir) | _device(options.device)
    chosen = None if options.only is None else set(options.only.split(","))
    parts = [one for one in _parts(options.device, options.dir) if chosen is None or one.name in chosen]
    document: dict[str, Any] = {"machine": facts, "parts": {}}
    name = facts["gpu"].lower().replace(" ", "-")
    out = options.out or BENCHMARKS / "results" / f"gpu_{name}_{facts['date'][:10]}.json"
    patience = 1.0 if options.device == "cuda" else 10.0  # a dry run may be on a slow or busy machine
    deadline_s = time.monotonic() + options.budget * patience
    for part in parts:
        limit_s = min(part.limit_s * patience, deadline_s - time.monotonic())
        document["parts"][part.name] = _run(part, limit_s)
        out.write_text(json.dumps(document, indent=1) + "\n")  # what is measured is kept if this is killed
    return _report(document, out)


def _device(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"gpu": "cpu", "cuda": None}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _parts(device: str, folder: Path) -> list[Part]:
    """Return the parts, the most wanted first: what the budget does not reach is left out."""
    python, is_dry = sys.executable, device == "cpu"
    at = ("--device", device)
    place = ("--dir", str(folder))

    def script(name: str, *words: str) -> tuple[str, ...]:
        return (python, str(BENCHMARKS / name), *words, "--out")

    small = "tiny" if is_dry else "gpt2-124m"
    states = ["tiny"] if is_dry else ["gpt2-124m", "gpt2-355m", "gpt2-xl"]
    files = sorted(
        str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    )
    tests = (python, "-m", "pytest", "-q", "-m", "gpu", *(("--collect-only",) if is_dry else ()), *files)
    example = str(ROOT / "examples" / "gpt" / "train.py")
    steps = ("--steps", "4" if is_dry else "20")
    questions = ("--only", "syncs,compile,shapes,input")  # `fit` searches for batches
    tune = (python, "-m", "holdfast.cli", "tune", "--json", *questions, *steps, example)
    return [
        Part("tests", tests, 120.0, writes=False),
        Part("stalls", script("gpu/stalls.py", *at, *place, "--states", *states), 240.0),
        Part("overlap", script("gpu/overlap.py", *at, *place, "--state", small), 60.0),
        Part("restore", script("tiers.py", *at, *place, "--state", small, "--rounds", "1"), 90.0),
        Part("fit", script("gpu/fitting.py", *at), 60.0),
        Part("shard", script("sharding.py", *at, "--ranks", "1", "--rounds", "1" if is_dry else "3"), 90.0),
        Part("compile", script("compiled.py", *at, *place, "--rounds", "1"), 120.0),
        Part("tune", tune, 180.0, writes=False),
    ]


def _run(part: Part, limit_s: float) -> dict[str, Any]:
    """Run a part. Return its exit status, seconds, the end of its output, and what it wrote."""
    if limit_s < 5.0:
        console.print(f"{part.name}: left out, the time is over")
        return {"error": "left out: the time was over", "took_s": 0.0}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [*part.command, *([str(answer)] if part.writes else [])]
        with log.open("wb") as out:
            status = _wait(command, out, limit_s)
        text = log.read_text(errors="replace")
        found = json.loads(answer.read_text()) if answer.exists() else None
    took_s = time.monotonic() - began_s
    console.print(f"{part.name}: status {status}, {took_s:.0f} s")
    result: dict[str, Any] = {"status": status, "took_s": round(took_s, 1), "result": found}
    if status == -1:
        result["error"] = f"stopped after {limit_s:.0f} s"
    if not part.writes or found is None:
        result["output"] = text[-20_000:]
    return result


def _wait(command: list[str], out: BinaryIO, limit_s: float) -> int:
    """Run a command, and end all its processes at the limit. Return its exit status; -1 at the limit."""
    process = subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _report(document: dict[str, Any], out: Path) -> int:
    rows = summary.rows(document)
    facts = document["machine"]
    table = Table(
        "part",
        "what",
        "found",
        "goal",
        "",
        title=f"{facts['gpu']}, torch {torch.__version__}, {facts['date']}",
    )
    for row in rows:
        table.add_row(row.part, row.what, row.found, row.goal, row.verdict)
    console.print(table)
    console.print(f"wrote {out}")
    return int(any(row.verdict == summary.FAIL for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
