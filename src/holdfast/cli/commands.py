"""Table of the commands, and the arguments that several of them have."""

from __future__ import annotations

import argparse
import importlib
import re
import textwrap
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

from holdfast.errors import InvalidInput
from holdfast.system.units import parse_duration

Commands = Any
"""Return value of `add_subparsers`; its class is private to argparse."""
GROUPS = {
    "Checkpoints, as in `holdfast ls runs/gpt`": {
        "ls": "List the checkpoints of a run, newest first.",
        "show": "Show the contents of a checkpoint: tensors and all other state.",
        "verify": "Hash every byte of a checkpoint again, and report all damage.",
        "diff": "Compare two checkpoints.",
        "import": "Create a home from torch.save, DCP, safetensors or Hugging Face.",
        "export": "Write a checkpoint for torch.load, Hugging Face, DCP and others.",
        "rm": "Delete checkpoints.",
        "trust": "Trust the compiled code in a home: trainings load and run it.",
    },
    "Runs, as in `holdfast report runs/gpt -o report.html`": {
        "report": "Report on a run: its saves, interruptions, cost and best interval.",
        "history": "Show the events of a run: saves, commits, restores and failures.",
        "stacks": "Show where each rank of a training is now, or was when it hung.",
        "metrics": "Print, write or serve live numbers of a run for Prometheus.",
        "dash": "Show jobs and runs in a browser: live output, curves, reports.",
    },
    "Training scripts, as in `holdfast check train.py`": {
        "check": "Compare a killed and resumed script with an uninterrupted run.",
        "replay": "Run recorded steps again, and compare them with the record.",
        "tune": "Run a few steps of a script, and report what would speed it up.",
    },
    "Jobs, as in `holdfast launch task.yaml`": {
        "launch": "Run a task file or a command as a job that survives failures.",
        "standby": "Run a command whose scripts restart with their modules imported.",
        "queue": "List jobs and their status.",
        "describe": "Show everything that is recorded about a job.",
        "logs": "Print the output of a job.",
        "wait": "Wait until jobs have ended.",
        "cancel": "Cancel jobs.",
        "preempt": "Simulate a preemption of a job.",
        "forget": "Remove ended jobs, with their files and output.",
        "nodes": "List the nodes of jobs, with the attempts that they have lost.",
        "drain": "Wait until all files of a write-back directory are in its bucket.",
    },
    "This machine, as in `holdfast doctor runs/gpt`": {
        "doctor": "Check whether this machine and a home are ready for training.",
        "demo": "Train, kill and resume a small GPT, and prove the result exact.",
        "version": "Show the versions and machine that a report of a problem needs.",
        "completion": "Print the completion script of a shell.",
    },
}
"""Summary of each command, by heading of the help, in its order."""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
_MODULES = {
    **dict.fromkeys(("queue", "wait", "cancel", "preempt", "forget", "nodes"), "job_commands"),
    **dict.fromkeys(("import", "export"), "exchange"),
}
"""Modules of the commands that are not in one of their own name."""


def load_command(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"holdfast.cli.{_MODULES.get(name, name)}")


def short_summary(name: str) -> str:
    """Return the summary of a command as a list shows it: in lower case, without a full stop."""
    summary = COMMANDS[name]
    return summary[0].lower() + summary[1:].rstrip(".")


def list_commands() -> str:
    """Return the groups of commands for the help, each with an example."""
    return "\n".join(
        f"\n{title}:\n" + "\n".join(f"  {name:11} {short_summary(name)}" for name in group)
        for title, group in GROUPS.items()
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a text that suggests the most similar of some names, or an empty text."""
    import difflib  # mistakes are rare

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near else ""


Argument: TypeAlias = Callable[[Any], object]
"""Declared argument: adds itself to a parser or group of argparse."""


def argument(usage: str, text: str, kind: Callable[[str], Any] | None = None, **settings: Any) -> Argument:
    """Declare an argument or an option.

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
    return lambda parser: parser.add_argument(*names, help=text, **settings)


def repeated(usage: str, text: str, kind: Callable[[str], Any] | None = None) -> Argument:
    """Declare an option that can be given several times, whose value is the list of all."""
    return argument(usage, f"{text}; can be repeated", kind, action="append", default=[])


def either(*options: Argument) -> Argument:
    """Declare options that exclude each other."""

    def add(parser: Any) -> None:
        group = parser.add_mutually_exclusive_group()
        for option in options:
            option(group)

    return add


_DECLARED: dict[str, Callable[[Commands], None]] = {}
"""Functions that add the commands of imported modules to a parser."""
Run: TypeAlias = Callable[[argparse.Namespace], "int | None"]


def command(name: str, examples: str, *arguments: Argument, details: str = "") -> Callable[[Run], Run]:
    """Declare the function that runs a command. It returns the exit status, or None for 0.

    Args:
        examples: command lines for the end of its help.
        arguments: its arguments and options, in the order of its help.
        details: sentences for its help, after its summary.
    """

    def declare(run: Run) -> Run:
        def add(commands: Commands) -> None:
            parser = commands.add_parser(
                name,
                description=f"{COMMANDS[name]} {details}".rstrip(),
                epilog=f"examples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            parser.set_defaults(run=run, parser=parser)
            for add_argument in (*arguments, _JSON):
                add_argument(parser)

        _DECLARED[name] = add
        return run

    return declare


def add_command(commands: Commands, name: str) -> None:
    """Add a command with its arguments."""
    load_command(name)
    _DECLARED[name](commands)


def _patience(text: str) -> float:
    """Parse a duration such as "20s" or "5m" into seconds."""
    try:
        return parse_duration(text, "--patience")
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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


PATIENCE = argument(
    "--patience TIME", "how long to retry when a bucket does not answer, such as 5m", _patience, default="20s"
)
HOME = argument("home HOME", "folder or URL that holds the checkpoints of the run"), PATIENCE
FILTER = argument("--filter GLOB", "only names that match, such as 'model.*.weight'")
PREFIXES = repeated("--only PREFIX", "only this name and the names below it, such as model")
BEST = argument("--best METRIC", "the checkpoint with the best value of this metric, instead of a step")
_JSON = argument("--json", "print JSON instead of text")


def attempt_option(*, default: str) -> Argument:
    """Declare `--attempt`, for a step that several attempts have saved."""
    return argument("--attempt A", f"only of this attempt (default: {default})", step_number)


def step_options(*, default: str) -> tuple[Argument, Argument]:
    """Declare `--step` and `--attempt`, which choose a checkpoint."""
    step = argument("--step N", f"step (default: {default})", step_number)
    return step, attempt_option(default="the newest")


def script_arguments(text: str) -> tuple[Argument, Argument]:
    """Declare SCRIPT, and the arguments that it gets."""
    arguments = argument("args ARGS", "arguments of the script", nargs=argparse.REMAINDER)
    return argument("script SCRIPT", text), arguments
