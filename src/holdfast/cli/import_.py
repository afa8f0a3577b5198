"""`holdfast import`: creates a home from a checkpoint of another library."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from holdfast.cli.homes import nearest_hint
from holdfast.cli.options import Commands, add_json, add_prefixes, command, step_number
from holdfast.cli.progress import byte_bar
from holdfast.cli.tables import print_json
from holdfast.errors import NotFound
from holdfast.system.units import format_bytes, format_duration, plural

_KINDS = ("auto", "torch", "dcp", "safetensors", "hf")
_EXAMPLES = """
holdfast import checkpoint.pt runs/gpt
holdfast import outputs/dcp/step-1000 runs/gpt --step 1000
holdfast import last.ckpt runs/gpt --only state_dict --step 500
holdfast import models/llama runs/llama --under model
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "import", run, examples=_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="file or folder to read")
    parser.add_argument("home", metavar="HOME", help="folder or URL of the new home")
    parser.add_argument(
        "--step", type=step_number, default=0, metavar="N", help="step of the checkpoint (default: 0)"
    )
    parser.add_argument(
        "--from",
        dest="kind",
        choices=_KINDS,
        default="auto",
        help="format of the source (default: auto, detected)",
    )
    add_prefixes(parser)
    parser.add_argument(
        "--under", metavar="KEY", help="put everything below this key, such as model for a bare state dict"
    )
    parser.add_argument(
        "--allow-expanded",
        action="store_true",
        help="also import tensors that are much larger than the source (expanded or shared)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
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
            only=args.only,
            under=args.under,
            allow_expanded=args.allow_expanded,
            on_total=bar.on_total,
            on_bytes=bar.on_bytes,
        )
    if args.json:
        print_json(asdict(done))
        return 0
    speed = f", {format_bytes(done.num_bytes / done.seconds)}/s" if done.seconds else ""
    tensors = f"{plural(done.num_tensors, 'tensor')}, {format_bytes(done.num_bytes)}"
    print(f"step {done.step} of {done.home}: {tensors} from {args.source} ({done.kind})", end="")
    print(f", {format_duration(done.seconds)}{speed}")
    return 0
