"""Cost of a restart of a compiled training: first start, same machine, and an empty one with the cache."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
from goals import COMPILED_SHARE
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
KINDS = ("cold", "kept", "restored")
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Start the same training on machines that have more or less; exit status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu (C++ kernels) or cuda (Triton)")
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/compiled_<hardware>_<date>.json")
    parser.add_argument("--train", metavar="HOME", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(_train(options.train, options.device)))
        return 0
    options.dir.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(options.dir)
    runs = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            runs.append({"round": number, **_round(Path(folder), options.device)})
        console.print("  ".join(f"{key} {value:.3f}" for key, value in runs[-1].items()))
    return _report(options, facts, runs)


def _round(folder: Path, device: str) -> dict[str, float]:
    """Cold; then a restart on the machine that has compiled; then one on an empty one; all of one home."""
    home, found = folder / "home", {}
    for kind, place in zip(KINDS, ("first", "first", "second"), strict=True):
        told = _start(home, folder / place, device)
        found |= {f"{kind}_{name}": value for name, value in told.items()}
    found["share"] = found["restored_cpu_s"] / found["cold_cpu_s"]
    found["home_bytes"] = sum(
        path.stat().st_size for path in (home / "compiled").rglob("*") if path.is_file()
    )
    return found


def _start(home: Path, place: Path, device: str) -> dict[str, float]:
    """One start on a machine whose folder for temporary files is `place`, where all that is compiled lies."""
    place.mkdir(exist_ok=True)
    compiler = home.parent / "g++"
    calls = home.parent / "calls"
    calls.write_text("")
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
    kept.pop("TRITON_CACHE_DIR", None)
    # One thread: the processor time of a pool of compilers counts only once it has ended, which it has not.
    own = {"TMPDIR": str(place), "TRITON_HOME": str(place), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--train", str(home), "--device", device],
        env=kept | own | {"CXX": str(compiler)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    compiles = [line for line in calls.read_text().splitlines() if ".cpp" in line or ".h.gch" in line]
    return json.loads(done.stdout) | {"compiler_calls": float(len(compiles))}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in used)


def _train(home: Path, device: str) -> dict[str, float]:
    """Restore, if there is something, and train one step; seconds from the Checkpointer to the step's end."""
    import time

    import torch
    from torch import nn

    import holdfast

    class Block(nn.Module):
        def __init__(self, width: int = 128) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(nn.Embedding(500, 128), *blocks, nn.Linear(128, 500)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model)
    x = torch.randint(0, 500, (8, 32), device=device)
    began_cpu_s, began_s = _cpu_s(), time.perf_counter()
    with holdfast.Checkpointer(
        home,
        {"model": model, "optimizer": optimizer},
        every=10**9,
        quiet=True,
        watches=[holdfast.Preemption(signals=False), holdfast.CompileCache(trust=True)],
    ) as checkpointer:
        step = checkpointer.restore() or 0
        loss = nn.functional.cross_entropy(compiled(x).view(-1, 500), x.view(-1))
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        spent = {"cpu_s": _cpu_s() - began_cpu_s, "wall_s": time.perf_counter() - began_s}
        checkpointer.save(step + 1)
    return spent


def _report(options: argparse.Namespace, facts: dict[str, Any], runs: list[dict[str, float]]) -> int:
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "round"}
    path = options.out or machine.results_path("compiled", facts)
    path.write_text(json.dumps({"machine": facts, "medians": medians, "runs": runs}, indent=1) + "\n")
    table = Table("", "median", "least", "most", title="From the Checkpointer to the end of the first step")
    for key, value in medians.items():
        values = [run[key] for run in runs]
        table.add_row(key, f"{value:.3f}", f"{min(values):.3f}", f"{max(values):.3f}")
    console.print(table)
    console.print(f"goal: share at most {COMPILED_SHARE}; wrote {path}")
    return int(medians["share"] > COMPILED_SHARE)


if __name__ == "__main__":
    sys.exit(main())
