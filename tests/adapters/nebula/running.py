"""Runs the scripts beside this file as processes of their own: alone, or as ranks of a process group."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nursery import shared

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 300


def run(script: str, *args: object, status: int = 0, env: dict[str, str] | None = None) -> str:
    """What a script prints; it must end with a status."""
    done = shared().run(_command(script, args), env={**os.environ, **(env or {})}, timeout_s=LIMIT_S)
    assert done.returncode == status, done.stderr
    return done.stdout


def run_ranks(count: int, *args: object, script: str = "ranks", dies: bool = False) -> list[list[str]]:
    """The lines that each of some ranks of a script has printed, by rank.

    Args:
        count: how many ranks.
        args: of the script.
        script: its name.
        dies: rank 1 is killed on the way, and the others with it, as a launcher does.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    folder = Path(tempfile.mkdtemp())
    ranks = [
        shared().start(
            _command(script, args),
            folder / f"output-{rank}",
            errors=folder / f"errors-{rank}",
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(count)
    ]
    try:
        if dies:
            assert ranks[1].wait(LIMIT_S) == -9, (folder / "errors-1").read_text()
        else:
            statuses = [one.wait(LIMIT_S) for one in ranks]
            told = "\n".join((folder / f"errors-{rank}").read_text() for rank in range(count))
            assert statuses == [0] * count, told
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [one.said().splitlines() for one in ranks]


def _command(script: str, args: Sequence[object]) -> list[str]:
    return [str(SCRIPTS / f"{script}.py"), *map(str, args)]
