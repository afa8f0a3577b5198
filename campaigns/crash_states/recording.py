"""Recordings of workloads: each is run under strace, in a new folder on a real disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from campaigns.crash_states.operations import Log, check_complete, read_log
from campaigns.crash_states.trace import Call, parse, record
from campaigns.crash_states.workloads import Act, Workload

_SOURCE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Recording:
    """A workload that was recorded: its folder as it was left, and the log of how it came to be."""

    workload: Workload
    folder: Path  # holds `root`, `trace.txt`

    @property
    def root(self) -> Path:
        """The folder that the workload has written."""
        return self.folder / "root"

    def calls(self) -> Iterator[Call]:
        """Return the recorded system calls on the folder, and the marks."""
        with (self.folder / "trace.txt").open(errors="surrogateescape") as lines:
            yield from parse(lines, (str(self.root), '</dev/null>, "mark '))

    def read(self) -> Log:
        """Parse the log.

        Raises:
            ValueError: it cannot be parsed, or does not lead to what is in the folder.
        """
        log = read_log(self.calls(), self.root)
        check_complete(log, self.root)
        return log


def make(workload: Workload, folder: Path) -> Recording:
    """Run a workload under strace.

    Raises:
        subprocess.CalledProcessError: it failed.
        FileNotFoundError: strace is not installed.
    """
    found = Recording(workload, folder.resolve())
    found.root.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "campaigns.crash_states.recording",
        json.dumps(asdict(workload)),
        str(found.root),
    ]
    record(
        command, found.folder / "trace.txt", env=environment(folder), fsync_delay_us=workload.fsync_delay_us
    )
    return found


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a workload's processes: nothing of the user's own settings of Holdfast."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return kept | {
        "HOLDFAST_RUNTIME_DIR": str(folder / "runtime"),
        "HOLDFAST_LOCAL": str(folder / "root" / "local"),
        "HOLDFAST_KEEP_IN_MEMORY": "0",
        "HOLDFAST_PREEMPTION": "none",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(_SOURCE / "src"), str(_SOURCE))),
    }


def play(workload: Workload, root: Path, env: Mapping[str, str] = os.environ) -> None:
    """Run the processes of a workload, one act after the other, in the environment `env`."""
    for act in workload.acts:
        if act.world_size > 1:
            from campaigns.crash_states.trainer import play_ranks

            play_ranks(root, act.world_size, *act.numbers, env=env)
        else:
            _run(act, root, dict(env))


def _run(act: Act, root: Path, env: dict[str, str]) -> None:
    if act.kill_at:
        env |= {"HOLDFAST_KILL_AT": act.kill_at, "HOLDFAST_KILL_MARK": str(root.parent / "killed")}
    command = [
        sys.executable,
        "-m",
        "campaigns.crash_states.trainer",
        act.name,
        str(root),
        *map(str, act.numbers),
    ]
    status = subprocess.run(command, env=env, check=False).returncode
    expected = -signal.SIGKILL if act.kill_at and not act.kills_keeper else 0
    if status != expected:
        raise RuntimeError(f"{act.name} ended with {status}, expected {expected}")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    play(Workload(**given | {"acts": tuple(Act(**act) for act in given["acts"])}), Path(sys.argv[2]))
