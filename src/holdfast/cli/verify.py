"""`holdfast verify`: hashes every byte of checkpoints again, and reports all damage."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.listing import candidates
from holdfast.checkpoint.home.newest import from_listing, was_deleted
from holdfast.checkpoint.restore.verify import VerifyReport, verify
from holdfast.checkpoint.store import Store
from holdfast.cli import FOUND, TROUBLE
from holdfast.cli.commands import CommandParser, Commands, count
from holdfast.cli.homes import open_home, read_run_id
from holdfast.cli.tables import byte_bar, format_rate, print_json, print_text
from holdfast.errors import Corrupt, HoldfastError, NotFound, Unsupported
from holdfast.system.units import format_bytes, plural

_EXAMPLES = """
holdfast verify runs/gpt
holdfast verify runs/gpt --step 500
holdfast verify runs/gpt --all && echo all good
"""

_Found = dict[CheckpointId, "Manifest | HoldfastError"]


@dataclass(frozen=True, slots=True)
class _Line:
    """Result of one checkpoint."""

    step: int
    attempt: int
    problems: tuple[str, ...]
    report: VerifyReport | None  # None if the manifest cannot be read

    @property
    def is_good(self) -> bool:
        return not self.problems

    @property
    def is_damaged(self) -> bool:
        """True if damage was found. A store that does not answer is not damage."""
        return bool(self.problems) and (self.report is None or bool(self.report.damage))

    @property
    def is_unread(self) -> bool:
        """True if some bytes could not be read, and the others are good."""
        return bool(self.problems) and not self.is_damaged


def add_verify(commands: Commands) -> None:
    """Add the command."""
    parser = CommandParser(
        commands, "verify", run, _EXAMPLES, "The exit status is 1 if a checkpoint is damaged."
    )
    parser.add_home()
    parser.add_step(default="the newest with a manifest")
    parser.add("--all", "every checkpoint of the home, including superseded ones")
    parser.add("--threads T", "number of threads", count, default=4)
    parser.add_json()


def run(args: argparse.Namespace) -> int:
    """Verify the chosen checkpoints."""
    store, lines = from_listing(lambda: _verify_chosen(args)) if args.step is None else _verify_chosen(args)
    if args.json:
        print_json({"home": store.url, "checkpoints": [_as_json(line) for line in lines]})
    elif len(lines) > 1:
        bad, unread = sum(line.is_damaged for line in lines), sum(line.is_unread for line in lines)
        rest = f", {unread} could not be read" if unread else ""
        print(f"{plural(len(lines) - unread, 'checkpoint')} verified, {bad} damaged{rest}")
    if any(line.is_damaged for line in lines):
        return FOUND
    return TROUBLE if any(line.is_unread for line in lines) else 0


def _verify_chosen(args: argparse.Namespace) -> tuple[Store, list[_Line]]:
    """Verify the chosen checkpoints, newest first, without those that a run deletes meanwhile."""
    store, manifests = _choose(args)
    if args.step is None and not args.all:
        print(f"holdfast: verifying step {next(iter(manifests)).step}, the newest", file=sys.stderr)
    lines: list[_Line] = []
    with byte_bar("verify") as bar:
        if bar.on_total is not None:
            bar.on_total(sum(found.data_bytes for found in manifests.values() if isinstance(found, Manifest)))
        for one, found in manifests.items():
            line = _Line(one.step, one.attempt, (str(found),), None)
            if isinstance(found, Manifest):
                report = verify(store, found, num_threads=args.threads, on_bytes=bar.on_bytes)
                problems = tuple(problem.message for problem in report.problems)
                line = _Line(one.step, one.attempt, problems, report)
            if not line.is_good and was_deleted(store, one):
                if not args.all:
                    raise NotFound(
                        f"Step {one.step} of attempt {one.attempt} was deleted while it was verified.",
                        step=one.step,
                    )
                continue
            lines.append(line)
            if not args.json:
                _print_line(line)
    return store, lines


def _choose(args: argparse.Namespace) -> tuple[Store, _Found]:
    """Return the chosen checkpoints, newest first, each with its manifest or an error."""
    store, home = open_home(args.home)
    run_id = read_run_id(store)
    every = candidates(home)
    chosen = [one for one in every if args.step in (None, one.step) and args.attempt in (None, one.attempt)]
    if not chosen:
        known = ", ".join(f"{one.step} (attempt {one.attempt})" for one in every[:20]) or "none"
        raise NotFound(
            f"{store.url} has no such complete checkpoint. Complete steps, newest first: {known}.",
            step=args.step,
        )
    found: _Found = {}
    for one in chosen if args.all else chosen[:1]:
        try:
            found[one] = read_manifest(store, one, run_id)
        except (Corrupt, NotFound, Unsupported) as error:
            if not was_deleted(store, one):
                found[one] = error
            elif not args.all:
                raise
    return store, found


def _print_line(line: _Line) -> None:
    what = f"step {line.step}, attempt {line.attempt}:"
    if line.is_good and line.report:
        report = line.report
        done = f"{plural(report.num_files, 'file')}, {format_bytes(report.num_bytes)} of data"
        print(f"{what} good ({done}, {format_rate(report.num_bytes, report.seconds)})")
    else:
        verdict = "DAMAGED" if line.is_damaged else "COULD NOT BE READ"
        print(f"{what} {verdict}, {plural(len(line.problems), 'problem')}")
        for problem in line.problems:
            print_text(problem, indent="  ")
    for extra in line.report.extra if line.report else ():
        print(f"  extra file, harmless: {extra}")


def _as_json(line: _Line) -> dict[str, Any]:
    report = line.report
    return {
        "step": line.step,
        "attempt": line.attempt,
        "good": line.is_good,
        "problems": [asdict(problem) for problem in report.problems]
        if report
        else [{"kind": "corrupt", "rank": None, "key": None, "message": line.problems[0]}],
        "extra": list(report.extra) if report else [],
        "bytes": report.num_bytes if report else 0,
        "seconds": report.seconds if report else 0.0,
    }
