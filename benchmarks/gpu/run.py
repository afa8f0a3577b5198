"""Everything that is measured on a GPU, part by part, in processes of their own and within a time budget."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent
sys.path[:0] = [str(BENCHMARKS), str(HERE)]

import machine  # noqa: E402 - the folder above is not a package
import summary  # noqa: E402
from descendants import run_alone  # noqa: E402
from parts import BUDGET_S, ROOT, Part, limit_of, list_parts  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120)


def main() -> int:
    """Run the parts in order; the exit status is 1 if one failed or a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: dry run, tiny states")
    parser.add_argument("--only", metavar="PARTS", help="comma-separated parts")
    parser.add_argument("--dir", type=Path, default=ROOT / ".bench", help="where checkpoints are written")
    parser.add_argument("--out", type=Path, help="results file; default results/gpu_<device>_<date>.json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("This machine has no CUDA device. For a dry run: benchmarks/gpu/run.sh --device cpu")
        return 2
    options.dir.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(options.dir) | _device(options.device)
    chosen = None if options.only is None else set(options.only.split(","))
    parts = [one for one in list_parts(options.device) if chosen is None or one.name in chosen]
    document: dict[str, Any] = {"machine": facts, "parts": {}}
    name = facts["gpu"].lower().replace(" ", "-")
    out = options.out or BENCHMARKS / "results" / f"gpu_{name}_{facts['date'][:10]}.json"
    patience = 1.0 if options.device == "cuda" else 10.0  # a dry run may be on a slow or busy machine
    deadline_s = time.monotonic() + BUDGET_S * patience
    for number, part in enumerate(parts):
        left_s = (deadline_s - time.monotonic()) / patience
        limit_s = limit_of(parts[number + 1 :], left_s) * patience
        document["parts"][part.name] = _run(part, options.dir.resolve(), limit_s)
        out.write_text(json.dumps(document, indent=1) + "\n")  # what is measured is kept if this is killed
    return _report(document, out)


def _device(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"gpu": "cpu", "cuda": None}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _run(part: Part, directory: Path, limit_s: float) -> dict[str, Any]:
    """Run a part. Return its exit status, seconds, the end of its output, and what it wrote."""
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as own,
        tempfile.TemporaryDirectory(dir=directory, prefix=f"{part.name}-") as folder,
    ):
        answer, log = Path(own) / "answer.json", Path(own) / "log"
        with log.open("wb") as out:
            words = part.words(answer, Path(folder), limit_s)
            status = run_alone(words, out, directory=ROOT, limit_s=limit_s)
        text = log.read_text(errors="replace")
        found = _read(answer)
    took_s = time.monotonic() - began_s
    console.print(f"{part.name}: status {status}, {took_s:.0f} s")
    result: dict[str, Any] = {"status": status, "took_s": round(took_s, 1), "result": found}
    if status is None:
        result["error"] = f"stopped after {limit_s:.0f} s"
    return result | {"output": text[-20_000:]}


def _read(answer: Path) -> dict[str, Any] | None:
    """Return what a part wrote; None if it was killed before that, or while it wrote."""
    try:
        return json.loads(answer.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _report(document: dict[str, Any], out: Path) -> int:
    rows = summary.rows(document)
    facts = document["machine"]
    title = f"{facts['gpu']}, torch {torch.__version__}, {facts['date']}"
    table = Table("part", "what", "found", "goal", "", title=title)
    for row in rows:
        table.add_row(row.part, row.what, row.found, row.goal, row.verdict)
    console.print(table)
    picture = out.with_suffix(".svg")
    picture.write_text(summary.plot(rows, f"{title}; dashed: the goals"))
    console.print(f"wrote {out} and {picture}")
    return int(any(row.verdict == summary.FAIL for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
