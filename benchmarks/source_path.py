"""Environment of child processes that import Holdfast from this working tree."""

from __future__ import annotations

import os
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"


def environment(source: Path = SOURCE) -> dict[str, str]:
    """Return this process's environment with a `src`, by default that of this tree, first in its PYTHONPATH.

    The rest of PYTHONPATH stays: on a machine without a network, packages are found there.
    """
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(source.resolve()), *others])}
