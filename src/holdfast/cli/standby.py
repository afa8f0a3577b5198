"""`holdfast standby`: runs a command whose training scripts have standbys."""

from __future__ import annotations

import argparse
import os

from holdfast.cli.commands import command, script_arguments
from holdfast.cli.experiment import script_words
from holdfast.watch.standby import with_standby


@command(
    "standby",
    """
    holdfast standby torchrun --nproc-per-node 8 --max-restarts 100 train.py
    holdfast standby train.py --lr 0.1
    """,
    *script_arguments("launcher such as torchrun, or training script"),
    details="A script that is started again, with the same arguments in the same folder, begins in a process "
    "that has imported its modules already. `holdfast launch --standby` does the same for jobs.",
)
def run(args: argparse.Namespace) -> int:
    """Replace this process with the command."""
    words = script_words(args.script, args.args)
    os.execvpe(words[0], words, with_standby(os.environ))
