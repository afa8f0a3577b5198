"""Runner of the scripts in this folder, alone or as ranks of a process group."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nursery import shared
from servers import reserve_port

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 600


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
    folder, port = Path(tempfile.mkdtemp()), str(reserve_port())
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
