"""`holdfast report`: one page that shows how a run went, and what its interruptions cost."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from holdfast.cli.inventory import open_home
from holdfast.cli.options import Commands, add_home, add_json, command
from holdfast.cli.tables import print_fields, print_json, print_text
from holdfast.errors import InvalidInput, RetryLater
from holdfast.quantity import say_bytes
from holdfast.report.headline import numbers, sentence
from holdfast.report.story import Story, read_story
from holdfast.restore.placing import placed_file

_EXAMPLES = """
holdfast report runs/gpt -o report.html
holdfast report runs/gpt -o - > report.html
holdfast report runs/gpt --json | jq .advice.own.daly_s
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    job = "Show how a run went: saves, failures and what each cost, overhead, and how often to save."
    parser = command(commands, "report", run, job=job, examples=_EXAMPLES)
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
    """Tell the story of a run as a page, as JSON, or as a few lines."""
    store, _ = open_home(args.home)
    story = read_story(store)
    if args.json:
        print_json({"home": store.url, **story.as_json()})
        return 0
    if args.output is None:
        _print_short(story)
        return 0
    from holdfast.report.page import page  # not above: other commands do without it

    title = args.title or Path(args.home.rstrip("/")).name or args.home
    text = page(story, name=title, made_unix_s=time.time())
    if args.output == "-":
        sys.stdout.write(text)
    else:
        _write(Path(args.output), text)
        print(f"{args.output}: {say_bytes(len(text.encode()))}")
    return 0


def _print_short(story: Story) -> None:
    print_text(sentence(story))
    print_fields(
        (f"{one.name}:", f"{one.value} ({one.remark})" if one.remark else one.value) for one in numbers(story)
    )
    print("-o FILE writes a page with charts; --json tells everything.")


def _write(path: Path, text: str) -> None:
    """Write the page beside its place first, so that a reader never finds half of it.

    Raises:
        InvalidInput: it cannot be written there.
    """
    try:
        with placed_file(path, overwrite=True) as partial:
            partial.write_text(text, encoding="utf-8")
    except (InvalidInput, RetryLater) as error:
        raise InvalidInput(f"The report cannot be written to {path}: {error}") from error
