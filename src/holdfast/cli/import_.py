"""`holdfast import`: makes a checkpoint of what another tool has saved."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from holdfast.cli.bars import byte_bar
from holdfast.cli.options import Commands, add_json, add_prefixes, command, step_number
from holdfast.cli.tables import print_json
from holdfast.units import format_bytes, format_duration, plural

_KINDS = ("auto", "torch", "dcp", "safetensors", "hf")
_EXAMPLES = """
holdfast import checkpoint.pt runs/gpt
holdfast import outputs/dcp/step-1000 runs/gpt --step 1000
holdfast import last.ckpt runs/gpt --only state_dict --step 500
holdfast import models/llama runs/llama --under model
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    job = "Make a home with one checkpoint from torch.save, DCP, safetensors or a Hugging Face folder."
    parser = command(commands, "import", run, job=job, examples=_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="the file or folder to read")
    parser.add_argument("home", metavar="HOME", help="folder or URL of a run that does not exist yet")
    parser.add_argument(
        "--step", type=step_number, default=0, metavar="N", help="step that it is of (default: 0)"
    )
    parser.add_argument(
        "--from",
        dest="kind",
        choices=_KINDS,
        default="auto",
        help="what the source is (default: auto, told by what is in it)",
    )
    add_prefixes(parser)
    parser.add_argument(
        "--under", metavar="KEY", help="put everything under this key, such as model for a bare state dict"
    )
    parser.add_argument(
        "--allow-expanded",
        action="store_true",
        help="write the tensors also if they have many times the bytes of the source (expanded, or shared)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Import."""
    from holdfast.exchange.importer import import_checkpoint  # not above: help must not wait for it

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
