"""Output of the checks before the attempts of a job."""

from __future__ import annotations

import textwrap

from holdfast.cli.tables import printable, terminal_width
from holdfast.jobs.description import JobDescription
from holdfast.jobs.node.checks.summary import describe_checks

_WIDTH = 110
"""Width of the lines where there is no terminal."""


def print_checks(found: JobDescription) -> None:
    """Print the checks of the newest attempt, and of all attempts with failed ones."""
    newest = max(found.checks, default=None)
    for number, of_nodes in found.checks.items():
        if number != newest and not any(one.failed for one in of_nodes.values()):
            continue
        print(f"\nchecks before attempt {number}:")
        for line in describe_checks(of_nodes):
            indent = len(line) - len(line.lstrip())
            wrapped = textwrap.wrap(
                printable(line),
                max(20, (terminal_width() or _WIDTH) - 4),
                subsequent_indent=" " * (indent + 4),
                break_on_hyphens=False,
            )
            print(textwrap.indent("\n".join(wrapped), "    "))
