"""Fork server of the tests' ranks: they share the imports of torch, which take a fresh process seconds."""

from __future__ import annotations

import functools
import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path


@functools.cache
def forkserver() -> ForkServerContext:
    """Return the context whose processes are forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded_ranks"])
    before = os.environ.get("PYTHONPATH")
    # The fork server of Python 3.11 ignores this process's sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
