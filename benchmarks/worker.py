"""Runs one measurement in a process of its own and brings back its answer, whatever happens in there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from amounts import Amounts
from results import Run
from source_path import environment

HERE = Path(__file__).resolve().parent
LIMIT_S = 1200.0


def measure_alone(
    contestant: str,
    state: str,
    number: int,
    directory: Path,
    *,
    amounts: Amounts,
    device: str = "cpu",
    is_others: bool = False,
    python: str = sys.executable,
    limit_s: float = LIMIT_S,
) -> Run:
    """Measure one run of a round. Its `error` is the reason of a failure, if there was one.

    `python` is the interpreter that has the packages; for `is_others`, see `measure.measure`.

    Blocks: until the measurement is complete, at most `limit_s`.
    """
    work = directory / "work"
    work.mkdir(parents=True)
    answer = directory / "answer.json"
    answer.unlink(missing_ok=True)
    command = [python, str(HERE / "measure.py"), contestant, state, str(work), str(answer)]
    started = time.monotonic()
    command += ["--amounts", amounts.text(), "--device", device]
    command += ["--others"] if is_others else []
    trouble = _run(command, log=directory / "log", limit_s=limit_s)
    found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    if not found.keys() & {"values", "not_installed", "error"}:  # the process ended before its answer
        found["error"] = trouble
    shutil.rmtree(work, ignore_errors=True)
    took_s = round(time.monotonic() - started, 1)
    return {"round": number, "state": state, "contestant": contestant, "took_s": took_s, **found}


def in_short(run: Run) -> str:
    """A run in one line."""
    head = f"round {run['round'] + 1}  {run['state']:11} {run['contestant']:26}"
    if "values" not in run:
        trouble = f"not installed: {run['not_installed']}" if "not_installed" in run else str(run["error"])
        return f"{head} {trouble[:300]}"
    values = run["values"]
    keys = ("blocked_s", "lost_s", "durable_s", "load_cold_s", "memcpy_s", "write_s", "read_s")
    numbers = "  ".join(f"{key.removesuffix('_s')} {values[key]:.3f}" for key in keys if key in values)
    return f"{head} {numbers}  (took {run['took_s']:.0f} s)"


def _run(command: list[str], *, log: Path, limit_s: float) -> str:
    """Run a command, end all its processes, and return how it ended."""
    with log.open("wb") as output:
        worker = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        try:
            status = f"no answer, exit status {worker.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            status = f"no answer within {limit_s:.0f} s"
        finally:
            # the session is the worker's own, so this reaches only what it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    tail = log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"{status}: {' '.join(tail)}"
