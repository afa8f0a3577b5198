"""Table of the commands, and the arguments that several of them have."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from holdfast.errors import InvalidInput
from holdfast.system.units import parse_duration

Commands = Any
"""Return value of `add_subparsers`; its class is private to argparse."""
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
_MODULES = {
    **dict.fromkeys(("queue", "wait", "cancel", "preempt", "forget", "nodes", "service"), "job_commands"),
    **dict.fromkeys(("import", "export"), "exchange"),
}
"""Modules of the commands that are not in one of their own name."""


def load_command(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"holdfast.cli.{_MODULES.get(name, name)}")


def add_command(commands: Commands, name: str) -> None:
    """Add a command with its arguments, by the function `add_NAME` of its module."""
    getattr(load_command(name), f"add_{name}")(commands)


def short_summary(name: str) -> str:
    """Return the summary of a command as a list shows it: in lower case, without a full stop."""
    summary = COMMANDS[name]
    return summary[0].lower() + summary[1:].rstrip(".")


class Arguments:
    """Arguments of a command, or a group of them: those of a parser or group of argparse."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def add(self, usage: str, text: str, kind: Callable[[str], Any] | None = None, **settings: Any) -> None:
        """Add an argument or an option.

        Args:
            usage: names and value as the help shows them: `-o, --output FILE`, `--all` for a flag, or
                `home HOME` for an argument whose name in the code is `home`.
            text: help. The default value is appended, unless the text has it.
            kind: function that parses the value.
            settings: further settings of `add_argument`.
        """
        names = re.split(", | ", usage)
        if not names[-1].startswith("-") and len(names) > 1:
            settings["metavar"] = names.pop()
        elif usage.startswith("-") and "choices" not in settings:
            settings["action"] = "store_true"
        if kind is not None:
            settings["type"] = kind
        if settings.get("default") not in (None, []) and "(default" not in text:
            text += f" (default: {settings['default']})"
        self._target.add_argument(*names, help=text, **settings)


class CommandParser(Arguments):
    """Parser of a command, with the arguments that several commands have.

    Args:
        commands: parsers of all commands, to which this one is added.
        run: function that runs the command.
        examples: command lines for the end of its help.
        details: sentences for its help, after its summary.
    """

    def __init__(
        self,
        commands: Commands,
        name: str,
        run: Callable[[argparse.Namespace], int],
        examples: str,
        details: str = "",
    ) -> None:
        parser = commands.add_parser(
            name,
            help=short_summary(name),
            description=f"{COMMANDS[name]} {details}".rstrip(),
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(run=run)
        super().__init__(parser)

    def add_exclusive_group(self) -> Arguments:
        """Add a group of options that exclude each other."""
        return Arguments(self._target.add_mutually_exclusive_group())

    def add_home(self) -> None:
        """Add HOME and `--patience`."""
        self.add("home HOME", "folder or URL that holds the checkpoints of the run")
        self.add_patience()

    def add_patience(self) -> None:
        """Add `--patience`, the time limit for a store that does not answer."""
        text = "how long to retry when a bucket does not answer, such as 5m"
        self.add("--patience TIME", text, _patience, default="20s")

    def add_step(self, *, default: str) -> None:
        """Add `--step` and `--attempt`, which choose a checkpoint."""
        self.add("--step N", f"step (default: {default})", step_number)
        self.add_attempt(default="the newest")

    def add_attempt(self, *, default: str) -> None:
        """Add `--attempt`, for a step that several attempts have saved."""
        self.add("--attempt A", f"only of this attempt (default: {default})", step_number)

    def add_filter(self) -> None:
        """Add `--filter`, a pattern of names."""
        self.add("--filter GLOB", "only names that match, such as 'model.*.weight'")

    def add_prefixes(self) -> None:
        """Add `--only`, the prefixes of the names to take."""
        text = "only this name and the names below it, such as model; can be repeated"
        self.add("--only PREFIX", text, action="append")

    def add_script(self, text: str) -> None:
        """Add SCRIPT, and the arguments that it gets."""
        self.add("script SCRIPT", text)
        self.add("args ARGS", "arguments of the script", nargs=argparse.REMAINDER)

    def add_json(self) -> None:
        """Add `--json`."""
        self.add("--json", "print JSON instead of text")


def _patience(text: str) -> float:
    """Parse a duration such as "20s" or "5m" into seconds."""
    try:
        return parse_duration(text, "--patience")
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_can_agree(args: argparse.Namespace, what_was_done: str) -> None:
    """Check that `--yes` was given or that the command can ask on the terminal."""
    if not args.yes and (args.json or not sys.stdin.isatty()):
        why = "--json does not ask" if args.json else "standard input is not a terminal"
        raise InvalidInput(f"Add --yes: {why}. {what_was_done}")


def agrees(question: str) -> bool:
    """Ask on the terminal, and return True if the answer is yes."""
    print(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def step_number(text: str) -> int:
    """Parse the number of a step, an attempt or a rank, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """Parse a number of things, 1 or more."""
    number = step_number(text)
    if not number:
        raise argparse.ArgumentTypeError("expected at least 1")
    return number
