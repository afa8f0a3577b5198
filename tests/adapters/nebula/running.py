"""Runs the scripts beside this file as processes of their own: alone, or as ranks of a process group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 300


def run(script: str, *args: object, status: int = 0, env: dict[str, str] | None = None) -> str:
    """What a script prints; it must end with a status."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, args)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
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
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, args)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        if dies:
            assert ranks[1].wait(LIMIT_S) == -9, ranks[1].communicate()
            for one in ranks:
                one.kill()
        outputs = [one.communicate(timeout=LIMIT_S) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    if not dies:
        assert [one.returncode for one in ranks] == [0] * count, "\n".join(err for _, err in outputs)
    return [out.splitlines() for out, _ in outputs]
