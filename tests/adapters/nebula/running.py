"""Runner of the scripts in this folder, alone or as ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from adapters.running import LIMIT_S, started_ranks
from nursery import shared

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, *args: object, status: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a script and return its output. Asserts its exit status."""
    done = shared().run(_command(script, args), env={**os.environ, **(env or {})}, timeout_s=LIMIT_S)
    assert done.returncode == status, done.stderr
    return done.stdout


def run_ranks(count: int, *args: object, script: str = "ranks", dies: bool = False) -> list[list[str]]:
    """Run ranks of a script and return the printed lines by rank.

    Args:
        count: number of ranks.
        args: arguments of the script.
        script: name of the script.
        dies: whether rank 1 is killed, and the others with it, as by a launcher.
    """
    with started_ranks(_command(script, args), count) as ranks:
        if dies:
            assert ranks.children[1].wait(LIMIT_S) == -9, ranks.errors()
            ranks.kill()
        else:
            statuses = [one.wait(LIMIT_S) for one in ranks.children]
            assert statuses == [0] * count, ranks.errors()
        return [one.said().splitlines() for one in ranks.children]


def _command(script: str, args: Sequence[object]) -> list[str]:
    return [str(SCRIPTS / f"{script}.py"), *map(str, args)]
