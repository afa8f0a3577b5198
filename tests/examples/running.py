"""Runs of the examples on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
LIMIT_S = 600


def environment() -> dict[str, str]:
    """Return the variables of this process, with the path of this version of Holdfast."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def run_on(ranks: int, script: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun to its end, whatever that is."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return subprocess.run(
        [sys.executable, *launcher, *map(str, (script, *words))],
        env={**environment(), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
