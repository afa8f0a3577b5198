"""Starts of a training: from the end of `import torch` to a restored state, each in a fresh process.

Each program gets 1.5 GB of plain tensors back, or only constructs a Checkpointer. torch.load and safetensors
load the same tensors from a file of their own. `restore` is the restore alone, into memory in use, like
that of a model which was just made, `keeper` a keeper without anything to do, and `step` a small training
that resumes, until its first step is done. The raw read and the copy in memory of the same bytes, measured
in each round, are the limits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import limits
import machine
from intervals import interval_of
from pagecache import evict, files_under
from rich.console import Console
from rich.table import Table
from source_path import environment

HERE = Path(__file__).resolve().parent
BEGIN = "import json, sys, time, torch\nshapes = json.loads(sys.argv[2]); began = time.perf_counter()\n"
STATE = "state = {name: torch.empty(shape) for name, shape in shapes}\n"
END = (
    "whole = time.perf_counter() - began\n"
    "print(json.dumps({'whole_s': whole, 'part_s': part, 'modules': len(sys.modules)}))\n"
    "if 'checkpointer' in globals(): checkpointer.close()\n"
)
OPTIMIZER = (
    "model = torch.nn.Linear(3, 3); optimizer = torch.optim.AdamW(model.parameters())\n"
    "began = time.perf_counter()\n"
)
RESTORE = (
    "import holdfast\n"
    "checkpointer = holdfast.Checkpointer(sys.argv[1], state, quiet=True)\n"
    "part = time.perf_counter()\ncheckpointer.restore()\npart = time.perf_counter() - part\n"
)
TRAINING = (
    "model = torch.nn.Linear(64, 64); optimizer = torch.optim.AdamW(model.parameters())\n"
    "def train():\n"
    "    optimizer.zero_grad(); model(torch.randn(8, 64)).square().mean().backward(); optimizer.step()\n"
)
PROGRAMS = {
    "step-plain": TRAINING + "train()\npart = 0\n",
    "step": TRAINING
    + (
        "import holdfast\n"
        "state = {'model': model, 'optimizer': optimizer}\n"
        "checkpointer = holdfast.Checkpointer(sys.argv[1], state, quiet=True)\n"
        "for number in checkpointer.steps(1_000_000):\n"
        "    train()\n"
        "    if number: break\n"
        "part = 0\n"
    ),
    "construct": (
        "import holdfast\nholdfast.Checkpointer(sys.argv[1], {'w': torch.zeros(3)}, quiet=True)\npart = 0\n"
    ),
    "construct-optimizer": (
        OPTIMIZER + "import holdfast\n"
        "holdfast.Checkpointer(sys.argv[1], {'m': model, 'o': optimizer}, quiet=True)\npart = 0\n"
    ),
    "holdfast": STATE + RESTORE,
    "restore": STATE + "for one in state.values(): one.fill_(1)\n" + RESTORE,
    "torch.load": "state = torch.load(sys.argv[1], weights_only=True)\npart = 0\n",
    "safetensors": "from safetensors.torch import load_file\nstate = load_file(sys.argv[1])\npart = 0\n",
}
PEERS = ("torch.load", "safetensors")
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)

Run = dict[str, float]
Environment = dict[str, str]


def main() -> int:
    """Measure all programs in turns, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--state", default="gpt2-124m", help="one of the states of states.py")
    parser.add_argument(
        "--dir", type=Path, default=HERE.parent / ".bench", help="where the files are written"
    )
    parser.add_argument("--before", type=Path, help="`src` of an older version, to measure in turns")
    parser.add_argument("--out", type=Path, help="default results/starts_<hardware>_<date>.json")
    options = parser.parse_args()
    options.dir.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        shapes = _save_all(options.state, folder)
        runs = [_round(number, folder, shapes, options.before) for number in range(options.rounds)]
    _report(options, runs)
    return 0


def _save_all(state: str, folder: Path) -> str:
    """Save the tensors in all formats, in a process of its own. Return their names and shapes as JSON."""
    code = (
        "import json, sys, torch; sys.path.insert(0, sys.argv[2])\n"
        "import holdfast, states, safetensors.torch\n"
        "tensors = states.build(sys.argv[3]).tensors(); folder = sys.argv[1]\n"
        "torch.save(tensors, f'{folder}/torch.load')\n"
        "safetensors.torch.save_file(tensors, f'{folder}/safetensors')\n"
        "with holdfast.Checkpointer(f'{folder}/holdfast', tensors, quiet=True) as ckpt:\n"
        "    ckpt.save(1).wait_durable()\n"
        "model = torch.nn.Linear(64, 64); optimizer = torch.optim.AdamW(model.parameters())\n"
        "model(torch.randn(8, 64)).sum().backward(); optimizer.step()\n"
        "state = {'model': model, 'optimizer': optimizer}\n"
        "with holdfast.Checkpointer(f'{folder}/trained', state, quiet=True) as ckpt:\n"
        "    ckpt.save(1).wait_durable()\n"
        "print(json.dumps([[name, list(tensor.shape)] for name, tensor in tensors.items()]))\n"
    )
    return _output(code, str(folder), str(HERE), state)


def _round(number: int, folder: Path, shapes: str, before: Path | None) -> Run:
    run: Run = {"round": number}
    largest = max(files_under(folder / "holdfast"), key=lambda path: path.stat().st_size)
    run["raw_read_s"] = min(limits.read_file_raw(largest).values())
    run["memcpy_s"] = _memcpy_s(shapes)
    for name in PEERS:
        for kind in ("cold", "warm"):
            run[f"{name}_{kind}_s"] = _load(name, folder / name, kind, shapes)["whole_s"]
    run["step-plain_s"] = _program("step-plain", folder, shapes)["whole_s"]
    sources = [("", environment()), *([("before_", environment(before))] if before else [])]
    for prefix, source in sources[:: 1 if number % 2 else -1]:  # none is always the first
        run |= {f"{prefix}{key}": value for key, value in _ours(folder, shapes, source).items()}
    console.print("  ".join(f"{key} {value:.3f}" for key, value in run.items() if key.endswith("_s")))
    return run


def _ours(folder: Path, shapes: str, source: Environment) -> Run:
    """Measure one version of Holdfast."""
    run: Run = {}
    for name in ("construct", "construct-optimizer"):
        found = _program(name, folder / "empty", shapes, source)
        run |= {f"{name}_s": found["whole_s"], f"{name}_modules": found["modules"]}
        shutil.rmtree(folder / "empty", ignore_errors=True)
    run["step_s"] = _program("step", folder / "trained", shapes, source)["whole_s"]
    run |= _keeper_start(source)
    for kind in ("cold", "warm"):
        run[f"holdfast_{kind}_s"] = _load("holdfast", folder / "holdfast", kind, shapes, source)["whole_s"]
        run[f"restore_{kind}_s"] = _load("restore", folder / "holdfast", kind, shapes, source)["part_s"]
    return run


def _load(name: str, path: Path, kind: str, shapes: str, source: Environment | None = None) -> Run:
    """Run a program whose files are in the page cache, or none of them."""
    if kind == "cold":
        evict(path)
    else:
        for file in files_under(path):
            file.read_bytes()
    return _program(name, path, shapes, source)


def _program(name: str, path: Path, shapes: str, source: Environment | None = None) -> Run:
    return json.loads(_output(BEGIN + PROGRAMS[name] + END, str(path), shapes, source=source))


def _keeper_start(source: Environment) -> Run:
    """Return the seconds of a process that loads what a keeper does, and its memory."""
    code = (
        "import json, resource, subprocess, time; from holdfast.system.entry import command\n"
        "began = time.perf_counter()\n"
        "subprocess.run(command('holdfast.checkpoint.keeper.worker'), check=True)\n"
        "seconds = time.perf_counter() - began\n"
        "print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))\n"
    )
    seconds, mib = json.loads(_output(code, source=source))
    return {"keeper_s": seconds, "keeper_mib": mib}


def _memcpy_s(shapes: str) -> float:
    """Return the seconds of the faster of two ways to copy the tensors in memory, in a process of its own."""
    code = (
        "import json, sys, torch; sys.path.insert(0, sys.argv[2])\n"
        "import limits, states\n"
        "class Plain:\n"
        "    device = torch.device('cpu')\n"
        "    def tensors(self): return {n: torch.randn(s) for n, s in json.loads(sys.argv[1])}\n"
        "print(limits.copy_in_memory(Plain())['memcpy_s'])\n"
    )
    return float(_output(code, shapes, str(HERE)))


def _output(code: str, *words: str, source: Environment | None = None) -> str:
    command, env = [sys.executable, "-c", code, *words], source or environment()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return done.stdout.strip().splitlines()[-1]


def _report(options: argparse.Namespace, runs: list[Run]) -> None:
    facts = machine.describe(options.dir)
    table = Table("", "estimate", "95 % interval", title=f"starts, {options.state}, {options.rounds} rounds")
    for key in runs[0]:
        if key.endswith("_s"):
            found = interval_of([run[key] for run in runs])
            table.add_row(
                key.removesuffix("_s"), f"{found.estimate:.3f} s", f"{found.low:.3f} to {found.high:.3f} s"
            )
    console.print(table)
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    document: dict[str, Any] = {"machine": facts, "state": options.state, "medians": medians, "runs": runs}
    path = options.out or machine.results_path("starts", facts)
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
