"""Runner of the scripts in this folder, alone or as ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from adapters import running
from nursery import shared

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, *args: object, status: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a script and return its output. Asserts its exit status."""
    done = shared().run(_command(script, args), env={**os.environ, **(env or {})}, timeout_s=running.LIMIT_S)
    assert done.returncode == status, done.stderr
    return done.stdout


def run_ranks(count: int, *args: object, script: str = "ranks", dies: bool = False) -> list[list[str]]:
    """Run ranks of a script, of which rank 1 is killed if one `dies`; return the printed lines by rank."""
    ended = running.run_ranks(_command(script, args), count, victim=int(dies))
    statuses = [one.status for one in ended]
    assert (statuses[1] == -9) if dies else (statuses == [0] * count), [one.errors for one in ended]
    return [one.output.splitlines() for one in ended]


def _command(script: str, args: Sequence[object]) -> list[str]:
    return [str(SCRIPTS / f"{script}.py"), *map(str, args)]
