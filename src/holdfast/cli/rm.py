"""`holdfast rm`: deletes checkpoints, each one's manifest first."""

from __future__ import annotations

import argparse
from operator import attrgetter

from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.claim import newest_number, note_emptied
from holdfast.checkpoint.home.commit import refuse
from holdfast.checkpoint.home.inventory import (
    COMPLETE,
    DAMAGED,
    INCOMPLETE,
    SKIPPED,
    SUPERSEDED,
    Inventory,
    Row,
    take_inventory,
)
from holdfast.checkpoint.home.listing import WriterId
from holdfast.checkpoint.home.retain import delete_files
from holdfast.checkpoint.store import Store
from holdfast.cli import print_note
from holdfast.cli.commands import HOME, argument, attempt_option, command, step_number
from holdfast.cli.homes import open_home, read_run_id
from holdfast.cli.tables import Column, byte_bar, format_age, may_remove, print_json
from holdfast.errors import Conflict, InvalidInput, NotFound
from holdfast.system.units import format_bytes, plural


@command(
    "rm",
    """
    holdfast rm runs/gpt --step 500
    holdfast rm runs/gpt --before 10000 --yes
    holdfast rm runs/gpt --superseded --incomplete --dry-run
    """,
    *HOME,
    argument("--step N", "this step", step_number),
    argument("--before N", "all steps before this one, except incomplete ones", step_number),
    argument("--superseded", "checkpoints that a newer attempt left behind"),
    argument("--incomplete", "files of saves that were not completed"),
    attempt_option(default="all"),
    argument("--force", "also the newest complete checkpoint, and files that may still be written"),
    argument("--dry-run", "only list what would be deleted"),
    argument("--yes, -y", "do not ask; required without a terminal"),
    details="The newest complete one is deleted only with --force.",
)
def run(args: argparse.Namespace) -> None:
    """Delete the chosen checkpoints, after asking on the terminal."""
    if args.step is None and args.before is None and not (args.superseded or args.incomplete):
        raise InvalidInput(
            "Choose what to delete: --step N, --before N, --superseded or --incomplete. Nothing was deleted."
        )
    store, home = open_home(args.home)
    inventory = take_inventory(store, home, read_run_id(store))
    is_done = store.size(names.DONE) is not None
    rows = _choose(inventory, args, is_done=is_done)
    if args.step is not None and not rows:
        raise NotFound(
            f"{store.url} has no step {args.step} to delete. `holdfast ls --all` lists all steps.",
            step=args.step,
        )
    texts = {"nothing": "nothing to delete", "question": "delete these checkpoints?"}
    is_agreed = may_remove(args, _COLUMNS, rows, **texts, refusal="Nothing was deleted.")
    if is_agreed:
        _delete_all(store, inventory, rows, is_done=is_done)
    if args.json:
        chosen = [row.as_json() for row in rows]
        print_json({"home": store.url, "chosen": chosen, "deleted": chosen if is_agreed else []})
    elif is_agreed:
        num_bytes = sum(row.num_bytes for row in rows)
        print(f"deleted {plural(len(rows), 'checkpoint')}, {format_bytes(num_bytes)}")
    elif rows and not args.dry_run:
        print("nothing was deleted")


def _choose(inventory: Inventory, args: argparse.Namespace, *, is_done: bool) -> list[Row]:
    """Return the chosen checkpoints, oldest first."""
    rows = [row for row in inventory.rows if args.attempt in (None, row.attempt) and _is_chosen(row, args)]
    if not args.force:
        newest = inventory.newest
        if newest in rows:
            assert newest is not None
            raise Conflict(
                f"Step {newest.step} of attempt {newest.attempt} is the newest complete checkpoint: the run "
                "would resume from it. Nothing was deleted. Add --force to delete it anyway.",
                step=newest.step,
            )
        kept = [] if is_done else [row for row in rows if _may_be_written(inventory, row)]
        for row in kept:
            print_note(
                f"kept step {row.step} of attempt {row.attempt}: the attempt is the newest and may still be "
                "writing it. If it has ended, add --force."
            )
        rows = [row for row in rows if row not in kept]
    return rows[::-1]


def _is_chosen(row: Row, args: argparse.Namespace) -> bool:
    is_saved = row.state in (COMPLETE, SUPERSEDED, DAMAGED, SKIPPED)
    return (
        row.step == args.step
        or (args.before is not None and row.step < args.before and is_saved)
        or (args.superseded and row.state == SUPERSEDED)
        or (args.incomplete and row.state == INCOMPLETE)
    )


def _may_be_written(inventory: Inventory, row: Row) -> bool:
    """Return True for incomplete checkpoints of the newest attempt: its keepers may still be writing them."""
    return row.state == INCOMPLETE and row.attempt >= max(inventory.home.attempts, default=0)


def _delete_all(store: Store, inventory: Inventory, rows: list[Row], *, is_done: bool) -> None:
    chosen = {row.checkpoint_id for row in rows}
    complete = {key for key, saved in inventory.home.saved.items() if saved.is_committed}
    is_emptied = bool(complete) and complete <= chosen and inventory.run_id is not None
    with byte_bar("rm") as bar:
        bar.on_total(sum(row.num_bytes for row in rows))
        for row in rows:
            # Before the last one is deleted, so that the next start may begin from scratch.
            if is_emptied and row is rows[-1]:
                note_emptied(store, inventory.run_id or "", newest_number(store))
            delete(store, inventory, row, must_refuse=not is_done and _may_be_written(inventory, row))
            bar.on_bytes(row.num_bytes)


_COLUMNS = (
    Column("STEP", attrgetter("step"), "right"),
    Column("ATTEMPT", attrgetter("attempt"), "right"),
    Column("SIZE", lambda row: format_bytes(row.num_bytes), "right"),
    Column("AGE", lambda row: format_age(row.created_unix_s)),
    Column("STATE", attrgetter("state")),
)


def delete(store: Store, inventory: Inventory, row: Row, *, must_refuse: bool = False) -> None:
    """Delete one checkpoint, and the unfinished files in its folder. Blocks until that is durable.

    `must_refuse` leaves a refusal: a rank of a running attempt that is still waiting for the commit would
    otherwise take the save for a checkpoint that was deleted.
    """
    found = {
        *inventory.home.saved[row.checkpoint_id].names,
        *(of(row.step, row.attempt) for of in (names.refusal, names.metrics, names.skipped)),
    }
    refusal = names.refusal(row.step, row.attempt)
    if must_refuse:
        found.discard(refusal)
        if store.size(refusal) is None:  # no rank has written one
            reason = f"Step {row.step} was not complete when `holdfast rm --force` deleted its files."
            writer = WriterId(inventory.run_id or "", row.attempt, 0, 1)
            refuse(store, writer, row.step, InvalidInput(reason, step=row.step))
    delete_files(store, found)
    store.sweep(f"{names.step_dir(row.step)}/")  # unfinished files of killed writers are not in the listing
