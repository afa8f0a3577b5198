"""`holdfast show`: shows the contents of a checkpoint."""

from __future__ import annotations

import argparse
import fnmatch
from operator import itemgetter
from typing import Any

from holdfast.checkpoint.home.documents import read_part
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.cli import print_note, values
from holdfast.cli.commands import BEST, FILTER, HOME, argument, command, step_number, step_options
from holdfast.cli.homes import open_home
from holdfast.cli.tables import Column, format_age, format_time, print_json, print_table, print_text
from holdfast.errors import InvalidInput
from holdfast.system.units import format_bytes, plural


@command(
    "show",
    """
    holdfast show runs/gpt
    holdfast show runs/gpt --step 500 --filter 'model.*.weight'
    holdfast show runs/gpt --rank 3 --filter 'rng*'
    holdfast show runs/gpt --json | jq '.tensors[] | select(.dtype == "BF16").name'
    """,
    *HOME,
    *step_options(default="the newest complete one"),
    BEST,
    argument("--rank R", "rank whose state to show", step_number, default=0),
    FILTER,
)
def run(args: argparse.Namespace) -> None:
    """Show one checkpoint. Only its manifest and one part are read."""
    store, _ = open_home(args.home)
    checkpoint = open_checkpoint(store, args.step, args.attempt, best=args.best)
    for skipped in checkpoint.skipped:
        print_note(f"skipped step {skipped.step}: {skipped.reason}")
    if args.rank >= checkpoint.world_size:
        raise InvalidInput(
            f"Step {checkpoint.step} was saved by {plural(checkpoint.world_size, 'rank')}, so rank "
            f"{args.rank} does not exist. Ranks are counted from 0.",
            step=checkpoint.step,
            rank=args.rank,
        )
    tensors = [name for name in checkpoint.keys() if _matches(name, args.filter)]  # noqa: SIM118 - no mapping
    state = read_part(store, checkpoint.manifest, args.rank).values
    if args.json:
        print_json(_as_json(checkpoint, tensors, state))
        return
    _print_facts(store.url, checkpoint)
    print(f"\n{plural(len(tensors), 'tensor')}")
    if tensors:
        print_table(_TENSOR_COLUMNS, ((name, checkpoint.info(name)) for name in tensors))
    found = [leaf for key, value in state.items() for leaf in values.leaves(value, key)]
    rows = [(path, values.format_value(value)) for path, value in found if _matches(path, args.filter)]
    print(f"\n{plural(len(rows), 'value')}")
    if rows:
        print_table((Column("NAME", itemgetter(0), "name"), Column("VALUE", itemgetter(1), "name")), rows)


def _matches(name: str, pattern: str | None) -> bool:
    return pattern is None or fnmatch.fnmatchcase(name, pattern)


def _as_json(checkpoint: Checkpoint, tensors: list[str], state: dict[str, Any]) -> dict[str, Any]:
    infos = ((name, checkpoint.info(name)) for name in tensors)
    return {
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "ranks": checkpoint.world_size,
        "run": checkpoint.run,
        "base_step": checkpoint.manifest.base_step,
        "created_unix_s": checkpoint.created,
        "data_bytes": checkpoint.manifest.data_bytes,
        "healthy": checkpoint.manifest.health.healthy,
        "health_reasons": list(checkpoint.manifest.health.reasons),
        "tensors": [
            {
                "name": name,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "bytes": info.num_bytes,
                "owner": info.owner,
                "tied_to": info.tied_to,
            }
            for name, info in infos
        ],
        "values": state,
    }


def _print_facts(url: str, checkpoint: Checkpoint) -> None:
    base = checkpoint.manifest.base_step
    start = "started from scratch" if base is None else f"resumed from step {base}"
    print(f"{url}: step {checkpoint.step}, attempt {checkpoint.attempt} ({start})")
    size, created = format_bytes(checkpoint.manifest.data_bytes), checkpoint.created
    ranks = plural(checkpoint.world_size, "rank")
    when = f"{format_time(created)} ({format_age(created)})"
    print_text(f"run {checkpoint.run}, saved by {ranks}, {size}, {when}")
    health = checkpoint.manifest.health
    print_text(f"health: {health.word} ({'; '.join(health.reasons)})")


_OWNERS = {"each": "each rank", "split": "split"}  # else the number of a rank
_TENSOR_COLUMNS = (
    Column("NAME", lambda row: row[0], "name"),
    Column("DTYPE", lambda row: row[1].dtype),
    Column("SHAPE", lambda row: list(row[1].shape), "name"),
    Column("SIZE", lambda row: None if row[1].tied_to else format_bytes(row[1].num_bytes), "right"),
    Column("SAVED BY", lambda row: _OWNERS.get(row[1].owner, f"rank {row[1].owner}"), spare=1),
    Column("TIED TO", lambda row: row[1].tied_to or "", "text"),
)
