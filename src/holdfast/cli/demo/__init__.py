"""`holdfast demo`: trains, kills, damages and resumes before your eyes, and proves that nothing was lost."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.cli.demo.figures import Figures, figures
from holdfast.cli.demo.proof import Claim, claims
from holdfast.cli.demo.story import Story
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.store import open_store
from holdfast.units import format_bytes, format_duration, parse_bytes

MIN_STEPS, MIN_BYTES = 48, 25_000_000

_EXAMPLES = """
holdfast demo
holdfast demo --home /mnt/disk --keep
holdfast demo --home s3://bucket/demos
holdfast demo --json | jq .proven
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    job = "Train a small GPT, kill it, damage a checkpoint, resume, and prove that nothing was lost."
    parser = command(commands, "demo", run, job=job, examples=_EXAMPLES)
    parser.add_argument(
        "--home",
        metavar="PLACE",
        help="folder, or URL in a bucket, in which to make the demo's own place (default: where temporary "
        "files go); with a URL each failure also takes all that was on this machine",
    )
    parser.add_argument("--keep", action="store_true", help="leave that folder there")
    parser.add_argument(
        "--steps",
        type=int,
        default=192,
        metavar="N",
        help=f"length of the training (default: 192; {MIN_STEPS} or more)",
    )
    parser.add_argument(
        "--size",
        default="100MB",
        metavar="SIZE",
        help="size of a checkpoint, about (default: 100MB; 25MB or more)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Do it, show it and judge it: 0 only if everything was proven."""
    from holdfast.cli.demo.screen import Screen  # not above: other commands must not wait for rich

    num_bytes = _check(args)
    began = time.monotonic()
    is_far = args.home is not None and "://" in args.home
    folder = _make_folder(None if is_far else args.home)
    home = _below(str(args.home), folder.name) if is_far else None
    try:
        with Screen(sys.stderr if args.json else sys.stdout, steps=args.steps, home=str(folder)) as screen:
            screen.say(f"everything happens in {home or folder}")
            story = Story(folder, steps=args.steps, num_bytes=num_bytes, screen=screen, home=home)
            outcome = story.tell()
        judged, numbers = claims(outcome), figures(outcome)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
            _empty(home)
    place = home or str(folder)
    proven = all(claim.holds for claim in judged)
    took_s = time.monotonic() - began
    if args.json:
        print_json(
            _document(judged, numbers, proven=proven, seconds=took_s, place=place if args.keep else None)
        )
        return 0 if proven else 1
    screen.show(judged, numbers)
    verdict = "everything was proven" if proven else "NOT everything was proven"
    print(f"\n{verdict}, in {format_duration(took_s)}" + (f"; kept in {place}" if args.keep else ""))
    return 0 if proven else 1


def _check(args: argparse.Namespace) -> int:
    """The size of a checkpoint in bytes.

    Raises:
        InvalidInput: an option has not the size that the demo needs.
    """
    num_bytes = parse_bytes(args.size, "--size")
    if args.steps < MIN_STEPS:
        raise InvalidInput(
            f"--steps must be {MIN_STEPS} or more, so that every failure has its place; got {args.steps}."
        )
    if num_bytes < MIN_BYTES:
        raise InvalidInput(
            f"--size must be {format_bytes(MIN_BYTES)} or more: the model itself needs that; got {args.size}."
        )
    return num_bytes


def _make_folder(parent: str | None) -> Path:
    """A new folder, so that nothing of the user's can be touched.

    Raises:
        InvalidInput: `parent` cannot be used.
    """
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="holdfast-demo-", dir=parent)).resolve()
    except OSError as error:
        raise InvalidInput(
            f"The demo cannot work in {parent or tempfile.gettempdir()}: {error.strerror}."
        ) from error


def _below(url: str, name: str) -> str:
    """The URL of a place of its own below another one, with the same options."""
    place, question, options = url.partition("?")
    return f"{place.rstrip('/')}/{name}{question}{options}"


def _empty(home: str | None) -> None:
    """Delete all that the demo has left in its place; what cannot be deleted stays, and is named."""
    if home is None:
        return
    try:
        store = open_store(home)
        for entry in list(store.list()):
            store.delete(entry.name)
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: not all of {home} could be deleted: {error}\n")


def _document(
    judged: list[Claim], numbers: Figures, *, proven: bool, seconds: float, place: str | None
) -> dict[str, Any]:
    return {
        "proven": proven,
        "seconds": round(seconds, 1),
        "kept_in": place,
        "claims": [asdict(claim) for claim in judged],
        "figures": {**asdict(numbers), "write_share": numbers.write_share},
    }
