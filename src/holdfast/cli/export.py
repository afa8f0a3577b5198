"""`holdfast export`: writes a checkpoint, or a part of it, in the format of another library."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from holdfast.checkpoint.exchange.exporter import KINDS, check_step, choose_kind
from holdfast.checkpoint.home.newest import deletion_named
from holdfast.checkpoint.restore.atomic_output import check_parent
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.cli.homes import open_home
from holdfast.cli.options import Commands, add_home, add_json, add_prefixes, add_step, command, step_number
from holdfast.cli.progress import byte_bar
from holdfast.cli.tables import print_json
from holdfast.system.units import format_bytes, format_duration, parse_bytes, plural

_EXAMPLES = """
holdfast export runs/gpt model.safetensors --only model --rename model=
holdfast export runs/gpt models/gpt --to hf --only model --rename model= --max-shard 5GB
holdfast export runs/gpt step-500.pt --step 500
holdfast export runs/gpt dcp-folder --to dcp
holdfast export out/holdfast out/checkpoint-500 --to trainer --step 500
holdfast export out/holdfast out-stock --to deepspeed
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = "Every byte is verified."
    parser = command(commands, "export", run, details=details, examples=_EXAMPLES)
    add_home(parser)
    parser.add_argument("dest", metavar="DEST", help="the file or folder to write")
    add_step(parser, default="the newest")
    parser.add_argument(
        "--to",
        dest="kind",
        choices=KINDS,
        help="format (default: by the suffix of DEST: safetensors for .safetensors, torch for .pt)",
    )
    add_prefixes(parser)
    parser.add_argument(
        "--rename",
        action="append",
        type=_pair,
        metavar="OLD=NEW",
        help="replace the prefix OLD with NEW, which may be empty; can be repeated",
    )
    parser.add_argument(
        "--max-shard",
        default="5GB",
        metavar="SIZE",
        help="largest file of a Hugging Face folder (default: 5GB)",
    )
    parser.add_argument(
        "--rank",
        type=step_number,
        default=0,
        metavar="R",
        help="rank whose per-rank state to write (default: 0)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file or folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint."""
    target = Path(args.dest).expanduser()
    kind = choose_kind(target, args.kind)
    check_parent(target)
    store, _ = open_home(args.home)
    checkpoint = open_checkpoint(store, args.step, args.attempt)
    check_step(target, checkpoint.step)
    if args.step is None:
        print(f"holdfast: exporting step {checkpoint.step}, the newest", file=sys.stderr)
    from holdfast.checkpoint.exchange.exporter import export_checkpoint  # slow, and needed only here

    with deletion_named(store, checkpoint.manifest.checkpoint_id), byte_bar("export") as bar:
        done = export_checkpoint(
            checkpoint,
            args.dest,
            kind=kind,
            only=args.only,
            rename=dict(args.rename or ()),
            max_shard_bytes=parse_bytes(args.max_shard, "--max-shard"),
            rank=args.rank,
            overwrite=args.overwrite,
            on_total=bar.on_total,
            on_bytes=bar.on_bytes,
        )
    if args.json:
        print_json({"home": store.url, **asdict(done)})
        return 0
    speed = f", {format_bytes(done.num_bytes / done.seconds)}/s" if done.seconds else ""
    tensors = f"{plural(done.num_tensors, 'tensor')}, {format_bytes(done.num_bytes)}"
    print(f"{done.path}: {tensors} of step {done.step} ({done.kind}), {format_duration(done.seconds)}{speed}")
    return 0


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, got {text!r}")
    return old, new
