"""The script for sbatch, as text; pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.jobs.slurm.options import Options

_BODY = """\
# Slurm may signal this shell only. A shell runs a trap only while it waits, never while a child
# runs in its foreground.
told= controller=
trap 'told=USR1; kill -USR1 "$controller" 2>/dev/null' USR1
trap 'told=TERM; kill -TERM "$controller" 2>/dev/null' TERM
{controller} &
controller=$!
if [ -n "$told" ]; then kill "-$told" "$controller"; fi
while kill -0 "$controller" 2>/dev/null; do wait "$controller"; done
wait "$controller"
status=$?
# The controller was killed, and could not requeue the job. A cancelled job stays cancelled.
if [ "$status" -gt 128 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True, slots=True)
class Script:
    """Contents of the script."""

    name: str
    task_id: str
    num_nodes: int
    options: Options
    controller: tuple[str, ...]  # command line of the controller, with paths that exist on every node
    folder: str  # folder of the job, on a file system that all nodes share
    output: str  # file for the output of the controller and of Slurm

    def text(self) -> str:
        """Return the script."""
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
            "open-mode": "append",  # otherwise each start would truncate it
            "requeue": None,
        }
        for name, value in {**ours, **self.options}.items():
            yield f"#SBATCH --{name}" + ("" if value is None else f"={_quoted(value)}")


def _quoted(value: str) -> str:
    """Quote a value for sbatch, which does not support single quotes within double ones."""
    return shlex.quote(value) if any(letter.isspace() or letter in "\"'#" for letter in value) else value
