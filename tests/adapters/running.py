"""Runner of the training script of an adapter's tests, alone or as several ranks."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nursery import shared

LIMIT_S = 300


def train(script: Path, folder: Path, *, status: int = 0, **plan: Any) -> dict[str, Any]:
    """Train in a process of its own, and return the end of the run; {} if the process is to fail."""
    return train_ranks(script, folder, 1, statuses=[status], **plan)[0]


def train_ranks(
    script: Path, folder: Path, count: int, *, statuses: Sequence[int] | None = None, **plan: Any
) -> list[dict[str, Any]]:
    """Train on ranks of one process group, and return the end of the run by rank.

    Args:
        script: the script, which takes the folder and the plan as JSON.
        folder: folder of the run.
        count: number of ranks.
        statuses: expected exit status by rank; by default all succeed. A rank that is killed takes the
            others with it, as a launcher does.
        plan: what the script is to do.
    """
    logs = Path(tempfile.mkdtemp())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(count):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        launched = {**{key: str(number) for key, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}
        env = {**os.environ, "MASTER_PORT": port, **(launched if count > 1 else {})}
        command = [str(script), str(folder), json.dumps(plan)]
        files = logs / f"output-{rank}", logs / f"errors-{rank}"
        ranks.append(shared().start(command, files[0], errors=files[1], env=env))
    expected = list(statuses or [0] * count)
    try:
        first_to_die = next((rank for rank, status in enumerate(expected) if status == -9), None)
        if first_to_die is not None:
            found = ranks[first_to_die].wait(LIMIT_S)
            assert found == -9, (logs / f"errors-{first_to_die}").read_text()
            return [{} for _ in ranks]
        found = [one.wait(LIMIT_S) for one in ranks]
        assert found == expected, "\n".join((logs / f"errors-{rank}").read_text() for rank in range(count))
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [
        json.loads(one.said().splitlines()[-1]) if not status else {}
        for one, status in zip(ranks, found, strict=True)
    ]
