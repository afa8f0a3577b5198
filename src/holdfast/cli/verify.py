"""`holdfast verify`: hashes every byte of checkpoints again, and reports all damage."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.listing import candidates
from holdfast.checkpoint.home.newest import from_listing, was_deleted
from holdfast.checkpoint.restore.verify import Problem, VerifyReport, verify
from holdfast.checkpoint.store import Store
from holdfast.cli import FOUND, TROUBLE, print_note
from holdfast.cli.commands import HOME, argument, command, count, step_options
from holdfast.cli.homes import open_home, read_run_id
from holdfast.cli.tables import byte_bar, format_rate, print_json, print_text
from holdfast.errors import Corrupt, HoldfastError, NotFound, Unsupported
from holdfast.system.documents import to_plain
from holdfast.system.units import format_bytes, plural

_Found = dict[CheckpointId, "Manifest | HoldfastError"]


@command(
    "verify",
    """
    holdfast verify runs/gpt
    holdfast verify runs/gpt --step 500
    holdfast verify runs/gpt --all && echo all good
    """,
    *HOME,
    *step_options(default="the newest with a manifest"),
    argument("--all", "every checkpoint of the home, including superseded ones"),
    argument("--threads T", "number of threads", count, default=4),
    details="The exit status is 1 if a checkpoint is damaged.",
)
def run(args: argparse.Namespace) -> int:
    """Verify the chosen checkpoints."""
    store, reports = from_listing(lambda: _verify_chosen(args)) if args.step is None else _verify_chosen(args)
    damaged = [report for report in reports if report.damage]
    # A store that does not answer.
    unread = [report for report in reports if report.problems and not report.damage]
    if args.json:
        print_json({"home": store.url, "checkpoints": list(map(_as_json, reports))})
    elif len(reports) > 1:
        rest = f", {len(unread)} could not be read" if unread else ""
        verified = plural(len(reports) - len(unread), "checkpoint")
        print(f"{verified} verified, {len(damaged)} damaged{rest}")
    return FOUND if damaged else TROUBLE if unread else 0


def _verify_chosen(args: argparse.Namespace) -> tuple[Store, list[VerifyReport]]:
    """Verify the chosen checkpoints, newest first, without those that a run deletes meanwhile."""
    store, manifests = _choose(args)
    if args.step is None and not args.all:
        print_note(f"verifying step {next(iter(manifests)).step}, the newest")
    reports: list[VerifyReport] = []
    with byte_bar("verify") as bar:
        bar.on_total(sum(found.data_bytes for found in manifests.values() if isinstance(found, Manifest)))
        for key, found in manifests.items():
            if isinstance(found, Manifest):
                report = verify(store, found, num_threads=args.threads, on_bytes=bar.on_bytes)
            else:
                problem = Problem(Corrupt.kind, None, None, str(found))
                report = VerifyReport(key.step, key.attempt, (problem,), (), 0, 0, 0.0)
            if report.is_good or not was_deleted(store, key):
                reports.append(report)
                if not args.json:
                    _print(report)
            elif not args.all:
                what = f"Step {key.step} of attempt {key.attempt}"
                raise NotFound(f"{what} was deleted while it was verified.", step=key.step)
    return store, reports


def _choose(args: argparse.Namespace) -> tuple[Store, _Found]:
    """Return the chosen checkpoints, newest first, each with its manifest or an error."""
    store, home = open_home(args.home)
    run_id = read_run_id(store)
    every = candidates(home)
    chosen = [key for key in every if args.step in (None, key.step) and args.attempt in (None, key.attempt)]
    if not chosen:
        known = ", ".join(f"{key.step} (attempt {key.attempt})" for key in every[:20]) or "none"
        raise NotFound(
            f"{store.url} has no such complete checkpoint. Complete steps, newest first: {known}.",
            step=args.step,
        )
    found: _Found = {}
    for key in chosen if args.all else chosen[:1]:
        try:
            found[key] = read_manifest(store, key, run_id)
        except (Corrupt, NotFound, Unsupported) as error:
            if not was_deleted(store, key):
                found[key] = error
            elif not args.all:
                raise
    return store, found


def _print(report: VerifyReport) -> None:
    what = f"step {report.step}, attempt {report.attempt}:"
    if report.is_good:
        done = f"{plural(report.num_files, 'file')}, {format_bytes(report.num_bytes)} of data"
        print(f"{what} good ({done}, {format_rate(report.num_bytes, report.seconds)})")
    else:
        verdict = "DAMAGED" if report.damage else "COULD NOT BE READ"
        print(f"{what} {verdict}, {plural(len(report.problems), 'problem')}")
        for problem in report.problems:
            print_text(problem.message, indent="  ")
    for extra in report.extra:
        print(f"  extra file, harmless: {extra}")


def _as_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "attempt": report.attempt,
        "good": report.is_good,
        "problems": [to_plain(problem) for problem in report.problems],
        "extra": list(report.extra),
        "bytes": report.num_bytes,
        "seconds": report.seconds,
    }
