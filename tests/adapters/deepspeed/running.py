"""Runner of the training script of this folder, as one or more ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adapters.running import LIMIT_S, started_ranks
from nursery import Child
from stage.training import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


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
    victim, mark = plan.get("rank", 0), folder.parent / "mark"
    mark.unlink(missing_ok=True)
    killer = {"HOLDFAST_KILL_AT": kill, "HOLDFAST_KILL_MARK": str(mark)}
    command = [SCRIPT, folder, json.dumps(plan)]
    env = {"DS_ACCELERATOR": "cpu"}
    with started_ranks(command, count, env=env, victim=victim, victim_env=killer) as ranks:
        if status == -9:
            assert ranks.children[victim].wait(LIMIT_S) == -9, ranks.errors()
            if kill:
                wait_until(mark.exists)  # a keeper may reach the place after its rank's end
            ranks.kill()
        else:
            found = [one.wait(LIMIT_S) for one in ranks.children]
            assert found == [status] * count, ranks.errors()
        return [_last(one) for one in ranks.children]


def _last(child: Child) -> dict[str, Any]:
    """Return the last result that a rank has written as a whole."""
    lines = [line for line in child.said().splitlines(keepends=True) if line.endswith("}\n")]
    return json.loads(lines[-1]) if lines else {}
