"""Runner of the training script of this folder, as one or more ranks."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from nursery import Child, shared
from servers import reserve_port

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
LIMIT_S = 300


def train(
    folder: Path, count: int = 1, *, status: int = 0, kill: str = "", **plan: Any
) -> list[dict[str, Any]]:
    """Train on ranks of one process group, and return the end of the run by rank.

    The dictionary of a rank that did not end has only the step at which it started.

    Args:
        folder: folder of checkpoints.
        count: number of ranks.
        status: expected exit status of all ranks. With -9 the plan's rank is killed, and takes the others
            with it, as a launcher does.
        kill: failpoint at which the plan's rank is killed, or its keeper.
        plan: what the script is to do.
    """
    place, port = Path(tempfile.mkdtemp()), str(reserve_port())
    victim, ranks = plan.get("rank", 0), []
    killer = {"HOLDFAST_KILL_AT": kill, "HOLDFAST_KILL_MARK": str(place / "mark")}
    for rank in range(count):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        env = {
            **os.environ,
            **{key: str(number) for key, number in numbers.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "DS_ACCELERATOR": "cpu",
            **(killer if rank == victim else {}),
        }
        files = place / f"output-{rank}", place / f"errors-{rank}"
        command = [SCRIPT, str(folder), json.dumps(plan)]
        ranks.append(shared().start(command, files[0], errors=files[1], env=env))
    try:
        if status == -9:
            found = ranks[victim].wait(LIMIT_S)
            assert found == -9, (place / f"errors-{victim}").read_text()
            if kill:
                _wait_for(place / "mark")  # a keeper may reach the place after its rank's end
            return [_last(one) for one in ranks]
        found = [one.wait(LIMIT_S) for one in ranks]
        said = "\n".join((place / f"errors-{rank}").read_text() for rank in range(count))
        assert found == [status] * count, said
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [_last(one) for one in ranks]


def _wait_for(mark: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not mark.exists():
        assert time.monotonic() < end, f"{mark} was not made"
        time.sleep(0.05)


def _last(child: Child) -> dict[str, Any]:
    """Return the last result that a rank has written as a whole."""
    lines = [line for line in child.said().splitlines(keepends=True) if line.endswith("}\n")]
    return json.loads(lines[-1]) if lines else {}
