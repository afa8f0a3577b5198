"""One rehearsal: a script runs in a process of its own, under a watcher, until that has seen enough."""

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

from holdfast.entry import command
from holdfast.errors import InvalidInput
from holdfast.surroundings import NOTICES, PROGRESS, REHEARSAL
from holdfast.train.tuning.facts import revive

T = TypeVar("T")
_TAIL_LINES = 15
_LOOK_S = 0.2
_LEAVE_S = 20.0  # what a script may take to clean up after it was told to end


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a rehearsal is to look at."""

    question: str
    """`steps`, `syncs`, `graphs` or `race`."""
    script: str
    args: tuple[str, ...]
    num_steps: int
    variant: str = ""
    """How a race compiles."""
    compiles_itself: bool = False
    loader: int | None = None
    """Which data loader has other settings than the script gives it."""
    num_workers: int | None = None
    batch_size: int | None = None

    @property
    def name(self) -> str:
        """A word for files and messages."""
        parts = [self.question, self.variant]
        parts += [f"workers-{self.num_workers}"] if self.num_workers is not None else []
        parts += [f"batch-{self.batch_size}"] if self.batch_size is not None else []
        return "-".join(filter(None, parts)).replace(" ", "-")


class Failed(Exception):
    """A rehearsal saw nothing; says why, with the end of what the script printed."""


class Rehearsals:
    """Runs plans, one after the other.

    Args:
        folder: for all that rehearsals write: their logs, what was seen, the checkpoints of the script.
        ranks: processes, started as torchrun does; None for one plain process.
        timeout_s: limit of each.
        debug: have torch write its own logs and traces of compilation too.
    """

    def __init__(self, folder: Path, *, ranks: int | None, timeout_s: float, debug: bool) -> None:
        self.folder = folder
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._debug = debug
        self.logs: list[Path] = []

    def run(self, plan: Plan, kind: type[T]) -> T:
        """What the plan's rehearsal has seen.

        Raises:
            Failed: the script failed, made no optimizer step, or took too long.

        Blocks: until the rehearsal has ended, at most the limit and some seconds.
        """
        own = self.folder / f"{len(self.logs)}-{plan.name}"
        own.mkdir()
        (own / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
        log = own / "log.txt"
        self.logs.append(log)
        with log.open("wb") as out:
            process = subprocess.Popen(
                self._command(own),
                env=self._environment(own),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ended = self._wait(process, own)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # workers of loaders and compilers that are left
                process.wait()
        return self._seen(own, log, kind, ended=ended)

    def _wait(self, process: subprocess.Popen[bytes], own: Path) -> bool:
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s and read_told(own) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
                return True
        is_told = read_told(own) is not None
        if not is_told:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(
                _LEAVE_S
            )  # what is told is told; a rank that waits for one that has left does not matter
        return is_told

    def _command(self, own: Path) -> list[str]:
        script = command("holdfast.train.tuning", str(own))
        if self._ranks is None:
            return script
        options = ("--standalone", "--max-restarts", "0", "--nproc-per-node", str(self._ranks))
        return command("torch.distributed.run", *options, *script[1:])  # it starts Python itself

    def _environment(self, own: Path) -> Mapping[str, str]:
        env = {name: value for name, value in os.environ.items() if name != PROGRESS}
        env |= {
            NOTICES: "none",
            "HOLDFAST_HOLD": "0",
            REHEARSAL: str(own / "homes"),
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),  # empty, so that compiling costs what it costs
            "TRITON_CACHE_DIR": str(own / "triton"),
            "PYTHONUNBUFFERED": "1",
        }
        if self._debug:
            env |= {"TORCH_TRACE": str(own / "trace"), "TORCH_LOGS": "recompiles,graph_breaks,perf_hints"}
        return env

    def _seen(self, own: Path, log: Path, kind: type[T], *, ended: bool) -> T:
        # The word of the probe counts, not the exit status: a rank of gloo may abort after all is done.
        told = read_told(own)
        if told is not None and "facts" in told:
            return revive(kind, told["facts"])
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        if told is not None:
            raise Failed(f"{told['trouble']}\n{tail}".rstrip())
        why = "it failed" if ended else f"it took more than {self._timeout_s:.0f} s and was ended"
        raise Failed(f"{why}; the end of its output ({log}):\n{tail}")


def read_plan(own: Path) -> Plan:
    """The plan in a rehearsal's folder."""
    data = json.loads((own / "plan.json").read_text())
    return Plan(**{**data, "args": tuple(data["args"])})


def tell(own: Path, told: Mapping[str, Any]) -> None:
    """Write what was seen, whole or not at all."""
    beside = own / f".told.{os.getpid()}"
    beside.write_text(json.dumps(told))
    beside.replace(own / "told.json")


def read_told(own: Path) -> dict[str, Any] | None:
    """What was told; None if nothing was."""
    try:
        return json.loads((own / "told.json").read_text())
    except FileNotFoundError:
        return None


def check_script(script: str) -> None:
    """See that there is a script to be run.

    Raises:
        InvalidInput: there is none.
    """
    if not Path(script).is_file():
        raise InvalidInput(
            f"There is no script {script!r}. Give the Python file that trains, then its arguments."
        )
