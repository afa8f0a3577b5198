"""The script that sbatch is given, as text; pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.jobs.slurm.options import Options

_BODY = """\
# What Slurm says may reach this shell alone. A shell runs a trap only while it waits: never while a child
# has its foreground.
told= controller=
trap 'told=USR1; kill -USR1 "$controller" 2>/dev/null' USR1
trap 'told=TERM; kill -TERM "$controller" 2>/dev/null' TERM
{controller} &
controller=$!
if [ -n "$told" ]; then kill "-$told" "$controller"; fi
while kill -0 "$controller" 2>/dev/null; do wait "$controller"; done
wait "$controller"
status=$?
# It was killed, and could not ask for that itself; what was cancelled meanwhile stays cancelled.
if [ "$status" -gt 128 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True, slots=True)
class Script:
    """What the script says."""

    name: str
    task_id: str
    num_nodes: int
    options: Options
    controller: tuple[str, ...]  # command line of the controller, with paths that every node has
    folder: str  # of the job, on a file system that all nodes share
    output: str  # file for what the controller and Slurm itself have to say

    def text(self) -> str:
        """The script."""
        head = "\n".join(["#!/bin/bash", *self._lines()])
        return f"{head}\n\n" + _BODY.format(controller=shlex.join(self.controller))

    def _lines(self) -> Iterator[str]:
        ours: Options = {
            "job-name": self.name,
            "comment": self.task_id,
            "nodes": str(self.num_nodes),
            "ntasks-per-node": "1",
            "chdir": self.folder,
            "output": self.output,
            "open-mode": "append",  # else each start would empty it
            "requeue": None,
        }
        for name, value in {**ours, **self.options}.items():
            yield f"#SBATCH --{name}" + ("" if value is None else f"={_quoted(value)}")


def _quoted(value: str) -> str:
    """As sbatch reads it, which is much like a shell but knows no single quotes within double ones."""
    return shlex.quote(value) if any(letter.isspace() or letter in "\"'#" for letter in value) else value
