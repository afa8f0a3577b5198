"""`holdfast import` and `holdfast export`: a checkpoint from and to the formats of other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.checkpoint.exchange.exporter import KINDS, check_step, choose_kind
from holdfast.checkpoint.home.newest import deletion_named
from holdfast.checkpoint.restore.atomic_output import check_parent
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.cli import print_note
from holdfast.cli.commands import BEST, HOME, PREFIXES, argument, command, repeated, step_number, step_options
from holdfast.cli.homes import nearest_hint, open_home
from holdfast.cli.tables import byte_bar, format_rate, print_result
from holdfast.errors import NotFound
from holdfast.system.documents import to_plain
from holdfast.system.units import format_bytes, parse_bytes, plural

_SOURCE_KINDS = ("auto", "torch", "dcp", "safetensors", "hf")


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, got {text!r}")
    return old, new


@command(
    "import",
    """
    holdfast import checkpoint.pt runs/gpt
    holdfast import outputs/dcp/step-1000 runs/gpt --step 1000
    holdfast import last.ckpt runs/gpt --only state_dict --step 500
    holdfast import models/llama runs/llama --under model
    """,
    argument("source SOURCE", "file or folder to read"),
    argument("home HOME", "folder or URL of the new home"),
    argument("--step N", "step of the checkpoint", step_number, default=0),
    argument(
        "--from",
        "format of the source (default: auto, detected)",
        dest="kind",
        choices=_SOURCE_KINDS,
        default="auto",
    ),
    PREFIXES,
    argument("--under KEY", "put everything below this key, such as model for a bare state dict"),
    argument(
        "--allow-expanded", "also import tensors that are much larger than the source (expanded or shared)"
    ),
)
def import_(args: argparse.Namespace) -> None:
    """Create the home."""
    if not Path(args.source).expanduser().exists():
        raise NotFound(f"{args.source} does not exist. {nearest_hint(args.source)}", key=args.source)
    from holdfast.checkpoint.exchange.importer import import_checkpoint  # slow, and needed only here

    with byte_bar("import") as bar:
        done = import_checkpoint(
            args.source,
            args.home,
            kind=args.kind,
            step=args.step,
            only=args.only or None,
            under=args.under,
            allow_expanded=args.allow_expanded,
            on_total=bar.on_total,
            on_bytes=bar.on_bytes,
        )
    tensors = f"{plural(done.num_tensors, 'tensor')}, {format_bytes(done.num_bytes)}"
    took = format_rate(done.num_bytes, done.seconds)
    text = f"step {done.step} of {done.home}: {tensors} from {args.source} ({done.kind}), {took}"
    print_result(args, to_plain(done), text)


@command(
    "export",
    """
    holdfast export runs/gpt model.safetensors --only model --rename model=
    holdfast export runs/gpt models/gpt --to hf --only model --rename model= --max-shard 5GB
    holdfast export runs/gpt step-500.pt --step 500
    holdfast export runs/gpt best.pt --best loss
    holdfast export runs/gpt dcp-folder --to dcp
    holdfast export out/holdfast out/checkpoint-500 --to trainer --step 500
    holdfast export out/holdfast out-stock --to deepspeed
    """,
    *HOME,
    argument("dest DEST", "the file or folder to write"),
    *step_options(default="the newest"),
    BEST,
    argument(
        "--to",
        "format (default: by the suffix of DEST: safetensors for .safetensors, torch for .pt)",
        dest="kind",
        choices=KINDS,
    ),
    PREFIXES,
    repeated("--rename OLD=NEW", "replace the prefix OLD with NEW, which may be empty", _pair),
    argument("--max-shard SIZE", "largest file of a Hugging Face folder", default="5GB"),
    argument("--rank R", "rank whose per-rank state to write", step_number, default=0),
    argument("--overwrite", "replace an existing file or folder"),
    details="Every byte is verified.",
)
def export(args: argparse.Namespace) -> None:
    """Write the checkpoint."""
    target = Path(args.dest).expanduser()
    kind = choose_kind(target, args.kind)
    check_parent(target)
    store, _ = open_home(args.home)
    checkpoint = open_checkpoint(store, args.step, args.attempt, best=args.best)
    check_step(target, checkpoint.step)
    if args.step is None:
        which = "newest" if args.best is None else f"best by {args.best}"
        print_note(f"exporting step {checkpoint.step}, the {which}")
    from holdfast.checkpoint.exchange.exporter import export_checkpoint  # slow, and needed only here

    with deletion_named(store, checkpoint.manifest.checkpoint_id), byte_bar("export") as bar:
        done = export_checkpoint(
            checkpoint,
            args.dest,
            kind=kind,
            only=args.only or None,
            rename=dict(args.rename),
            max_shard_bytes=parse_bytes(args.max_shard, "--max-shard"),
            rank=args.rank,
            overwrite=args.overwrite,
            on_total=bar.on_total,
            on_bytes=bar.on_bytes,
        )
    tensors = f"{plural(done.num_tensors, 'tensor')}, {format_bytes(done.num_bytes)}"
    took = format_rate(done.num_bytes, done.seconds)
    text = f"{done.path}: {tensors} of step {done.step} ({done.kind}), {took}"
    print_result(args, {"home": store.url, **to_plain(done)}, text)
