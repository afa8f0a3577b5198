"""Time to restore after kill -9 of a trainer: from its keeper's memory, and from a cold disk."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import limits
import machine
import torch
from goals import KEEPER_MEMORY
from pagecache import evict
from rich.console import Console
from rich.table import Table
from states import Subject, build

HERE = Path(__file__).resolve().parent
GOALS = {"memory_of_memcpy": KEEPER_MEMORY, "cold_of_memory": 3.0}
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Kill and restore in turns; exit status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", default="gpt2-124m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of the state: cpu or cuda")
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/tiers_<hardware>_<date>.json")
    parser.add_argument("--child", choices=("die", "restore"), help=argparse.SUPPRESS)
    parser.add_argument("--hold", default="2m", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child, options)
        return 0
    directory = options.dir.resolve() / f"tiers-{os.getpid()}"
    directory.mkdir(parents=True)
    facts = machine.describe(directory)
    try:
        runs = [_round(number, options, directory) for number in range(options.rounds)]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return _report(options, facts, runs)


def _round(number: int, options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """A trainer that is killed, a start from its keeper's memory, another kill, and a start from the disk."""
    _die(options, directory, hold="2m")
    from_memory = _restore(options, directory)
    shutil.rmtree(directory / "home")
    _die(options, directory, hold="0")
    evict(directory)
    from_disk = _restore(options, directory)
    shutil.rmtree(directory / "home")
    for found, source in ((from_memory, "memory"), (from_disk, str(directory / "home"))):
        if found["source"] != source:
            raise RuntimeError(f"restored from {found['source']}, expected {source}")
    run = {
        "round": number,
        "memory_s": from_memory["restore_s"],
        "cold_s": from_disk["restore_s"],
        "memcpy_s": statistics.median([from_memory["memcpy_s"], from_disk["memcpy_s"]]),
    }
    run["memory_of_memcpy"] = run["memcpy_s"] / run["memory_s"]
    run["cold_of_memory"] = run["cold_s"] / run["memory_s"]
    console.print("  ".join(f"{key} {value:.3f}" for key, value in run.items()))
    return run


def _die(options: argparse.Namespace, directory: Path, *, hold: str) -> None:
    status = subprocess.run(_command("die", options, directory, hold), check=False).returncode
    if status != -signal.SIGKILL:
        raise RuntimeError(f"the trainer ended with {status}")


def _restore(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    command = _command("restore", options, directory, "0")
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _command(what: str, options: argparse.Namespace, directory: Path, hold: str) -> list[str]:
    script = str(Path(__file__).resolve())
    return [
        sys.executable,
        script,
        "--child",
        what,
        "--state",
        options.state,
        "--device",
        options.device,
        "--dir",
        str(directory),
        "--hold",
        hold,
    ]


def _child(what: str, options: argparse.Namespace) -> None:
    sys.path.insert(0, str(HERE.parent / "src"))
    import holdfast

    directory: Path = options.dir
    subject = build(options.state, options.device)
    objects: dict[str, Any] = {"model": subject.model, "optimizer": subject.optimizer}
    checkpointer = holdfast.Checkpointer(
        directory / "home",
        objects,
        every=10**9,
        quiet=True,
        memory=holdfast.Memory("32GiB", keep_for=options.hold),
    )
    if what == "die":
        checkpointer.prepare()
        checkpointer.save(1).wait_durable()
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps(_timed_restore(checkpointer, subject, directory)))


def _timed_restore(checkpointer: Any, subject: Subject, directory: Path) -> dict[str, Any]:
    """One restore, checked against the saved state: the trainer that died had the same seed."""
    expected = subject.digest()
    memcpy_s = limits.copy_in_memory(subject)["memcpy_s"]
    subject.scramble()
    started = time.perf_counter()
    step = checkpointer.restore()
    if subject.device.type == "cuda":
        torch.cuda.synchronize()
    restore_s = time.perf_counter() - started
    if step != 1 or subject.digest() != expected:
        raise RuntimeError(f"step {step} is not what was saved")
    checkpointer.save(2)  # a restore alone leaves no line in the history
    checkpointer.close()
    return {"restore_s": restore_s, "memcpy_s": memcpy_s, "source": _source(directory)}


def _source(directory: Path) -> str:
    """Return the tier of the restore, from the history of the run."""
    lines = [json.loads(line) for path in directory.glob("home/history/*") for line in path.open()]
    tiers = [line["tier"] for line in lines if line["event"] == "restored"]
    return "memory" if tiers == ["memory"] else str(directory / "home")


def _report(options: argparse.Namespace, facts: dict[str, Any], runs: list[dict[str, float]]) -> int:
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "round"}
    path = options.out or machine.results_path("tiers", facts)
    document = {"machine": facts, "state": options.state, "rounds": options.rounds, "medians": medians}
    path.write_text(json.dumps(document | {"tiers": runs}, indent=1) + "\n")
    table = Table("", "median", "goal", title=f"restoring {options.state} after kill -9, verified")
    for key, value in medians.items():
        table.add_row(key, f"{value:.3f}", f"at least {GOALS[key]}" if key in GOALS else "")
    console.print(table)
    console.print(f"wrote {path}")
    return int(any(medians[key] < goal for key, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
