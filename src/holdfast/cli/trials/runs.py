"""Trials of a script: runs in a separate process with redirected homes, which end by themselves or a kill."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holdfast.checkpoint.format import names
from holdfast.cli.homes import nearest_hint
from holdfast.cli.trials.traces import Trace, read_trace
from holdfast.errors import InvalidInput
from holdfast.system.environment import TRIAL, sandbox_environment
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.linux.process_group import end_of, process_group


class Trials:
    """Runs a command several times, one after the other.

    Args:
        folder: folder for the homes, traces and logs of all trials.
        timeout_s: time limit of each trial.
        on_progress: called with a line after each trial.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, *, timeout_s: float, on_progress: Callable[[str], None]
    ) -> None:
        self._command = list(command)
        self._folder = folder
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._num_trials = 0

    def homes(self, name: str) -> Path:
        """Return the folder with the homes of the trials called `name`."""
        return self._folder / f"homes-{name}"

    def run(self, homes: str, what: str, plan: dict[str, object], *, is_killed: bool = False) -> Trace:
        """Run one trial and return its trace.

        Args:
            homes: name of its homes, which an earlier trial may have used.
            plan: fields of `holdfast.checkpoint.run.trial.TrialPlan`, without the folder.
            is_killed: whether the plan kills the script.

        Raises:
            InvalidInput: the script failed, created no Checkpointer, or took too long.

        Blocks: until the trial has ended.
        """
        self._num_trials += 1
        own = self._folder / f"trial-{self._num_trials}"
        own.mkdir()
        plan_file, log = own / "plan.json", own / "log.txt"
        plan_file.write_text(json.dumps({"folder": str(own), **plan}))
        env = sandbox_environment(self.homes(homes)) | {TRIAL: str(plan_file)}
        began_s = time.monotonic()
        status = self._wait(log, env)
        trace = read_trace(own)
        self._on_progress(f"trial {self._num_trials}: {what}: {time.monotonic() - began_s:.1f} s")
        if status is None:
            raise InvalidInput(f"{what}: the script ran for more than {self._timeout_s:.0f} s. {_tail(log)}")
        if not trace.has_files:
            raise InvalidInput(
                f"{what}: the script ended with status {status} and created no Checkpointer. {_tail(log)}"
            )
        if status not in (0, None) and not is_killed:
            raise InvalidInput(f"{what}: the script failed with status {status}. {_tail(log)}")
        if is_killed and not trace.was_killed:
            raise InvalidInput(
                f"{what}: the script ended with status {status} before it could be killed. {_tail(log)}"
            )
        return trace

    def _wait(self, log: Path, env: dict[str, str]) -> int | None:
        """Run the command. Return its exit status, or None if it took too long."""
        with process_group(self._command, env, log) as process:
            try:
                return process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                return None


def script_words(script: str, args: Sequence[str]) -> list[str]:
    """Return the command that starts a training script, as the user starts it.

    Args:
        script: a Python file, or any command.

    Raises:
        InvalidInput: it does not exist.
    """
    if script.endswith(".py"):
        if not Path(script).is_file():
            raise InvalidInput(f"The script {script!r} does not exist. {nearest_hint(script)}")
        return [sys.executable, script, *args]
    if shutil.which(script) is None:
        raise InvalidInput(
            f"The command {script!r} does not exist. Give a Python file, or a command after --."
        )
    return [script, *args]


@contextlib.contextmanager
def trial_folder(command: str, keep: str | None) -> Iterator[Path]:
    """Yield a temporary folder for trials, which is copied to `keep` at the end."""
    with temporary_folder(command) as folder:
        try:
            yield folder
        finally:
            if keep:
                shutil.copytree(folder, keep, dirs_exist_ok=True)


def show_progress(text: str) -> None:
    """Print a line on stderr."""
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


def newest_steps(homes: Path) -> dict[str, int]:
    """Return the newest step with a manifest in each home, by name."""
    found: dict[str, int] = {}
    for manifest in sorted(homes.glob(f"*/{names.step_dir(0)[:5]}*/manifest-*.json")):
        home = manifest.parent.parent.name
        found[home] = max(found.get(home, 0), int(manifest.parent.name[5:]))
    return found


def _tail(log: Path) -> str:
    return f"The end of its output:\n{end_of(log)}"
