"""Runner of the training script of this folder, as one or more ranks."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from nursery import shared
from servers import reserve_port

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
LIMIT_S = 300


def train(folder: Path, count: int = 1, *, status: int = 0, **plan: Any) -> list[dict[str, Any]]:
    """Train on ranks of one process group, and return the end of the run by rank.

    Args:
        folder: folder of checkpoints.
        count: number of ranks.
        status: expected exit status of all ranks. With -9 the plan's rank is killed, and takes the others
            with it, as a launcher does.
        plan: what the script is to do.
    """
    place, port = Path(tempfile.mkdtemp()), str(reserve_port())
    ranks = []
    for rank in range(count):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        env = {
            **os.environ,
            **{key: str(number) for key, number in numbers.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "DS_ACCELERATOR": "cpu",
        }
        files = place / f"output-{rank}", place / f"errors-{rank}"
        command = [SCRIPT, str(folder), json.dumps(plan)]
        ranks.append(shared().start(command, files[0], errors=files[1], env=env))
    victim = plan.get("rank", 0)
    try:
        if status == -9:
            found = ranks[victim].wait(LIMIT_S)
            assert found == -9, (place / f"errors-{victim}").read_text()
            return [{} for _ in ranks]
        found = [one.wait(LIMIT_S) for one in ranks]
        said = "\n".join((place / f"errors-{rank}").read_text() for rank in range(count))
        assert found == [status] * count, said
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [json.loads(one.said().splitlines()[-1]) if not status else {} for one in ranks]
