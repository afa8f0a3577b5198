"""`holdfast report`: reports on a run as text, JSON or a page with charts."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from holdfast.checkpoint.restore.atomic_output import check_parent
from holdfast.cli.commands import HOME, argument, command
from holdfast.cli.homes import open_home
from holdfast.cli.tables import naming_output, print_fields, print_json, print_text, write_output
from holdfast.jobs.description import read_node_checks
from holdfast.system.units import format_bytes
from holdfast.watch.report.page import headline, headline_numbers, tear_check
from holdfast.watch.report.summary import RunSummary, read_summary


@command(
    "report",
    """
    holdfast report runs/gpt -o report.html
    holdfast report runs/gpt -o - > report.html
    holdfast report runs/gpt --json | jq .advice.own.daly_s
    """,
    *HOME,
    argument(
        "-o, --output FILE",
        "write a page with charts, one HTML file (- for standard output); needs torch-holdfast[report]",
    ),
    argument("--title TEXT", "heading of the page (default: the name of HOME)"),
)
def run(args: argparse.Namespace) -> None:
    """Print the summary of a run as a page, JSON, or a few lines."""
    if args.output not in (None, "-"):
        with naming_output(args.output, "the report to "):
            check_parent(Path(args.output))
    store, _ = open_home(args.home)
    summary = read_summary(store, read_node_checks(store))
    if args.json:
        print_json({"home": store.url, **summary.as_json()})
        return
    if args.output is None:
        _print_short(summary)
        return
    from holdfast.watch.report.page import make_page  # slow, and needed only here

    title = args.title or Path(args.home.rstrip("/")).name or args.home
    text = make_page(summary, name=title, made_unix_s=time.time())
    if args.output == "-":
        sys.stdout.write(text)
    else:
        write_output(args.output, text, "the report to ")
        print(f"{args.output}: {format_bytes(len(text.encode()))}")


def _print_short(summary: RunSummary) -> None:
    print_text(headline(summary))
    print_fields(
        (f"{number.name}:", f"{number.value} ({number.remark})" if number.remark else number.value)
        for number in headline_numbers(summary)
    )
    if method := tear_check(summary):
        print_text(method)
    print("Use -o FILE for a page with charts, or --json for all data.")
