"""`holdfast demo`: trains, kills, damages and resumes a small GPT, and proves that nothing was lost."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast.checkpoint.store import open_store
from holdfast.cli import print_note
from holdfast.cli.commands import argument, command
from holdfast.cli.demo.claims import check_claims, find_recoveries
from holdfast.cli.demo.hosts import isolated
from holdfast.cli.demo.scenario import Scenario
from holdfast.cli.tables import print_json
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.system.documents import to_plain
from holdfast.system.entry import command as command_of
from holdfast.system.units import format_bytes, format_duration, parse_bytes

MIN_STEPS, MIN_BYTES = 48, 25_000_000


@command(
    "demo",
    """
    holdfast demo
    holdfast demo --hosts 3
    holdfast demo --home /mnt/disk --keep
    holdfast demo --home s3://bucket/demos
    holdfast demo --json | jq .proven
    """,
    argument(
        "--hosts N",
        "instead: train on N hosts of this machine, of which one dies whole; needs network namespaces",
        int,
    ),
    argument(
        "--home PLACE",
        "folder or URL in which to create the folder of the demo (default: the folder of temporary "
        "files); with a URL, each failure also deletes the files on this machine",
    ),
    argument("--keep", "do not delete the folder of the demo"),
    argument(
        "--steps N", f"number of training steps (default: 192, at least {MIN_STEPS}; with --hosts 32)", int
    ),
    argument(
        "--size SIZE", "approximate size of a checkpoint (default: 100MB, at least 25MB; with --hosts 25MB)"
    ),
)
def run(args: argparse.Namespace) -> int:
    """Run the demo and show its results. The exit status is 0 only if all claims are proven."""
    from holdfast.cli.demo.screen import Screen

    args.steps = args.steps or (192 if args.hosts is None else 32)
    num_bytes = _check(args)
    if args.hosts is not None:
        return _run_hosts(args, num_bytes)
    began = time.monotonic()
    home = None
    if args.home is not None and "://" in args.home:
        folder = _make_folder(None)
        url, question, options = args.home.partition("?")
        home = f"{url.rstrip('/')}/{folder.name}{question}{options}"
    else:
        folder = _make_folder(args.home)
    try:
        screen = Screen(sys.stderr if args.json else sys.stdout, steps=args.steps, home=str(folder))
        screen.show_event(f"all files of the demo are in {home or folder}")
        outcome = Scenario(folder, steps=args.steps, num_bytes=num_bytes, screen=screen, home=home).run()
        checked, recoveries = check_claims(outcome), list(find_recoveries(outcome))
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
            if home is not None:
                _delete_objects(home)
    place = home or str(folder)
    proven = all(claim.holds for claim in checked)
    took_s = time.monotonic() - began
    if args.json:
        facts = {"proven": proven, "seconds": round(took_s, 1), "kept_in": place if args.keep else None}
        figures = {"recoveries": [to_plain(recovery) for recovery in recoveries]}
        print_json({**facts, "claims": [to_plain(claim) for claim in checked], "figures": figures})
    else:
        screen.show_results(checked, recoveries)
        verdict = "all claims are proven" if proven else "NOT all claims are proven"
        print(f"\n{verdict}, in {format_duration(took_s)}" + (f"; kept in {place}" if args.keep else ""))
    return 0 if proven else 1


def _run_hosts(args: argparse.Namespace, num_bytes: int) -> int:
    """Run the demo of a lost host. The exit status is 0 only if no step was lost beyond the announced one."""
    folder, form = _make_folder(args.home), "json" if args.json else "text"
    numbers = map(str, (args.hosts, args.steps, num_bytes))
    try:
        program = command_of("holdfast.cli.demo.lost_host", str(folder), *numbers, form)
        return subprocess.run(isolated(program)).returncode
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _check(args: argparse.Namespace) -> int:
    """Check the options, and return the size of a checkpoint in bytes."""
    num_bytes = parse_bytes(args.size or ("100MB" if args.hosts is None else "25MB"), "--size")
    if args.hosts is not None and not 2 <= args.hosts <= 16:
        raise InvalidInput(f"--hosts must be between 2 and 16; got {args.hosts}.")
    if args.hosts is not None and "://" in (args.home or ""):
        raise InvalidInput("With --hosts, --home is a folder, which all hosts share.")
    least = MIN_STEPS if args.hosts is None else 12
    if args.steps < least:
        raise InvalidInput(f"--steps must be {least} or more, which all failures need; got {args.steps}.")
    if num_bytes < MIN_BYTES:
        raise InvalidInput(
            f"--size must be {format_bytes(MIN_BYTES)} or more, the size of the model; got {args.size}."
        )
    return num_bytes


def _make_folder(parent: str | None) -> Path:
    """Create a new folder for all files of the demo."""
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="holdfast-demo-", dir=parent)).resolve()
    except OSError as error:
        raise InvalidInput(
            f"Cannot create a folder in {parent or tempfile.gettempdir()}: {error.strerror}."
        ) from error


def _delete_objects(home: str) -> None:
    """Delete the objects of the demo in a bucket. A failure is reported on stderr."""
    try:
        store = open_store(home)
        for entry in list(store.list()):
            store.delete(entry.name)
    except HoldfastError as error:
        print_note(f"cannot delete all of {home}: {error}")
