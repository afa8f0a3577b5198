"""A profile run: a script in its own process, under a watcher that ends it once it has measured enough."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import InvalidInput
from holdfast.system.documents import decode_dataclass, read_dataclass
from holdfast.system.entry import command
from holdfast.system.environment import sandbox_environment
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.processes import end_of, process_group

T = TypeVar("T")
_POLL_S = 0.2
_EXIT_S = 20.0  # limit for the script's cleanup after SIGINT


@dataclasses.dataclass(frozen=True, slots=True)
class RunSpec:
    """Specification of a profile run."""

    question: str
    """`steps`, `syncs`, `graphs` or `race`."""
    script: str
    args: tuple[str, ...]
    num_steps: int
    variant: str = ""
    """The way to compile, in a comparison of compiled and eager steps."""
    compiles_itself: bool = False
    loader: int | None = None
    """Index of the data loader whose settings are changed."""
    num_workers: int | None = None
    batch_size: int | None = None

    @property
    def name(self) -> str:
        """A short name for files and messages."""
        parts = [self.question, self.variant]
        parts += [f"workers-{self.num_workers}"] if self.num_workers is not None else []
        parts += [f"batch-{self.batch_size}"] if self.batch_size is not None else []
        return "-".join(filter(None, parts)).replace(" ", "-")


class RunFailed(Exception):
    """A profile run without a result. The message has the reason and the end of the script's output."""


class ProfileRuns:
    """Runner of profile runs, one after the other.

    Args:
        folder: folder for all files of the runs: logs, results, the script's checkpoints.
        ranks: number of processes, started like torchrun does. None starts one plain process.
        timeout_s: limit of each run.
        debug: let torch write its own logs and traces of compilation too.
    """

    def __init__(self, folder: Path, *, ranks: int | None, timeout_s: float, debug: bool) -> None:
        self.folder = folder
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._debug = debug
        self.logs: list[Path] = []

    def run(self, spec: RunSpec, kind: type[T]) -> T:
        """Return the measurements of a run.

        Blocks: until the run has ended, at most the limit plus some seconds.
        """
        own = self.folder / f"{len(self.logs)}-{spec.name}"
        own.mkdir()
        (own / "spec.json").write_text(json.dumps(dataclasses.asdict(spec)))
        log = own / "log.txt"
        self.logs.append(log)
        with process_group(self._command(own), self._environment(own), log) as process:
            status = self._wait(process, own)
        return self._seen(own, log, kind, status)

    def _wait(self, process: subprocess.Popen[bytes], own: Path) -> int | None:
        """Wait for the result or the end of the process. Return its exit status; None if it was stopped."""
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s and read_result(own) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
        if read_result(own) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)  # the result exists; a rank may still wait for one that has left
        return None

    def _command(self, own: Path) -> list[str]:
        script = command("holdfast.train.tuning", str(own))
        if self._ranks is None:
            return script
        options = ("--standalone", "--max-restarts", "0", "--nproc-per-node", str(self._ranks))
        return command("torch.distributed.run", *options, *script[1:])  # it starts Python itself

    def _environment(self, own: Path) -> Mapping[str, str]:
        env = sandbox_environment(own / "homes") | {
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),  # empty, so that compiling costs what it costs
            "TRITON_CACHE_DIR": str(own / "triton"),
        }
        if self._debug:
            env |= {"TORCH_TRACE": str(own / "trace"), "TORCH_LOGS": "recompiles,graph_breaks,perf_hints"}
        return env

    def _seen(self, own: Path, log: Path, kind: type[T], status: int | None) -> T:
        # The result counts, not the exit status: a gloo rank may abort after its work is done.
        result = read_result(own)
        if result is not None and "facts" in result:
            return read_dataclass(kind, result["facts"], "the result of a profile run")
        tail = end_of(log)
        if result is not None:
            raise RunFailed(f"{result['failure']}\n{tail}".rstrip())
        why = f"it ended with exit status {status} before the measurements were complete"
        if status is None:
            why = f"it took more than {self._timeout_s:.0f} s and was killed"
        raise RunFailed(f"{why}; the end of its output ({log}):\n{tail}")


def read_spec(own: Path) -> RunSpec:
    """Read the specification in a run's folder."""
    return decode_dataclass(RunSpec, (own / "spec.json").read_text(), "the specification of a profile run")


def write_result(own: Path, result: Mapping[str, Any]) -> None:
    """Write the result atomically."""
    write_atomic(own / "result.json", json.dumps(result), is_durable=False)


def read_result(own: Path) -> dict[str, Any] | None:
    """Return the result, or None if it is missing."""
    try:
        return json.loads((own / "result.json").read_text())
    except FileNotFoundError:
        return None


def check_script(script: str) -> None:
    """Check that the script exists."""
    if not Path(script).is_file():
        raise InvalidInput(
            f"The script {script!r} does not exist. Pass the Python file that trains, then its arguments."
        )
