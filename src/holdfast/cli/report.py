"""`holdfast report`: reports on a run as text, JSON or a page with charts."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.checkpoint.restore.atomic_output import atomic_file, check_parent
from holdfast.cli.homes import open_home
from holdfast.cli.options import Commands, add_home, add_json, command
from holdfast.cli.tables import print_fields, print_json, print_text
from holdfast.errors import InvalidInput, RetryLater
from holdfast.jobs.description import read_node_checks
from holdfast.system.units import format_bytes
from holdfast.watch.report.page import headline, headline_numbers, tear_check
from holdfast.watch.report.summary import RunSummary, read_summary

_EXAMPLES = """
holdfast report runs/gpt -o report.html
holdfast report runs/gpt -o - > report.html
holdfast report runs/gpt --json | jq .advice.own.daly_s
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "report", run, examples=_EXAMPLES)
    add_home(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write a page with charts, one HTML file (- for standard output); needs torch-holdfast[report]",
    )
    parser.add_argument("--title", metavar="TEXT", help="heading of the page (default: the name of HOME)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the summary of a run as a page, JSON, or a few lines."""
    if args.output not in (None, "-"):
        with _named(args.output):
            check_parent(Path(args.output))
    store, _ = open_home(args.home)
    summary = read_summary(store, read_node_checks(store))
    if args.json:
        print_json({"home": store.url, **summary.as_json()})
        return 0
    if args.output is None:
        _print_short(summary)
        return 0
    from holdfast.watch.report.page import make_page  # slow, and needed only here

    title = args.title or Path(args.home.rstrip("/")).name or args.home
    text = make_page(summary, name=title, made_unix_s=time.time())
    if args.output == "-":
        sys.stdout.write(text)
    else:
        _write(Path(args.output), text)
        print(f"{args.output}: {format_bytes(len(text.encode()))}")
    return 0


def _print_short(summary: RunSummary) -> None:
    print_text(headline(summary))
    print_fields(
        (f"{one.name}:", f"{one.value} ({one.remark})" if one.remark else one.value)
        for one in headline_numbers(summary)
    )
    if method := tear_check(summary):
        print_text(method)
    print("Use -o FILE for a page with charts, or --json for all data.")


def _write(path: Path, text: str) -> None:
    """Write the page atomically."""
    with _named(str(path)), atomic_file(path, overwrite=True) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _named(output: str) -> Iterator[None]:
    """Name the report in errors of its file."""
    try:
        yield
    except (InvalidInput, RetryLater) as error:
        raise InvalidInput(f"Cannot write the report to {output}: {error}") from error
