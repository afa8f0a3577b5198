"""Table of the commands: each one's name, summary and module."""

from __future__ import annotations

import importlib
import keyword
import sys
from types import ModuleType

COMMANDS = {
    "ls": "List the checkpoints of a run, newest first.",
    "show": "Show the contents of a checkpoint: tensors and all other state.",
    "verify": "Hash every byte of a checkpoint again, and report all damage.",
    "diff": "Compare two checkpoints.",
    "import": "Create a home from a checkpoint of torch.save, DCP, safetensors or Hugging Face.",
    "export": "Write a checkpoint as safetensors, or for Hugging Face, torch.load, DCP or DeepSpeed.",
    "history": "Show the events of a run: saves, commits, restores and failures.",
    "stacks": "Show where each rank of a training is now, or was when it hung.",
    "report": "Report on a run: its saves, interruptions and overhead, and the best save interval.",
    "metrics": "Print, write or serve live numbers of a run for Prometheus.",
    "rm": "Delete checkpoints.",
    "drain": "Wait until all files of a write-back directory are in its bucket.",
    "demo": "Train a small GPT, kill it, damage a checkpoint, resume, and prove that nothing was lost.",
    "launch": "Run a SkyPilot task file or a command as a job that restarts after crashes and preemptions.",
    "queue": "List jobs and their status.",
    "describe": "Show everything that is recorded about a job.",
    "logs": "Print the output of a job.",
    "dash": "Show jobs and runs in a browser: attempts, live output, curves and reports.",
    "wait": "Wait until jobs have ended.",
    "cancel": "Cancel jobs.",
    "preempt": "Simulate a preemption of a job.",
    "forget": "Remove ended jobs, with their files and output.",
    "nodes": "List the nodes of jobs, with the attempts that they have lost.",
    "service": "Continue jobs after a restart of the machine.",
    "trust": "Trust the compiled code in a home, so that trainings load and run it.",
    "tune": "Run a few steps of a training script in several ways, and report what would speed it up.",
    "check": "Kill and resume a training script, and compare it with an uninterrupted run, bit for bit.",
    "replay": "Run recorded steps again, and compare the result with the checkpoint that the run saved.",
    "completion": "Print the completion script of a shell.",
}
"""Summary of each command, in the order of the help."""


def load_command(name: str) -> ModuleType:
    """Import the module of a command, which has `add_parser` and `run`.

    A module has the name of its command, with an underscore appended if Python itself uses that name.
    """
    is_taken = keyword.iskeyword(name) or name in sys.stdlib_module_names
    return importlib.import_module(f"holdfast.cli.{name}_" if is_taken else f"holdfast.cli.{name}")


def short_summary(name: str) -> str:
    """Return the summary of a command as a list shows it: in lower case, without a full stop."""
    summary = COMMANDS[name]
    return summary[0].lower() + summary[1:].rstrip(".")
