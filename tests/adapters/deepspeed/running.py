"""Runner of the training script of this folder, as one or more ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adapters.running import run_ranks
from stage.training import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


def train(
    folder: Path, count: int = 1, *, status: int = 0, kill: str = "", **plan: Any
) -> list[dict[str, Any]]:
    """Train on ranks of one process group, and return the end of the run by rank.

    The dictionary of a rank that did not end has only the step at which it started. All ranks are to end with
    `status`. With -9 it is the plan's rank, which takes the others with it, as a launcher does; `kill` is the
    failpoint at which it is killed, or its keeper.
    """
    victim, mark = plan.get("rank", 0), folder.parent / "mark"
    mark.unlink(missing_ok=True)
    killer = {"HOLDFAST_KILL_AT": kill, "HOLDFAST_KILL_MARK": str(mark)}
    words, env = [SCRIPT, folder, json.dumps(plan)], {"DS_ACCELERATOR": "cpu"}
    ended = run_ranks(words, count, env=env, victim=victim, victim_env=killer)
    checked = [ended[victim]] if status == -9 else ended
    assert {one.status for one in checked} == {status}, [one.errors for one in ended]
    if status == -9 and kill:
        wait_until(mark.exists)  # a keeper may reach the place after its rank's end
    return [_last(one.output) for one in ended]


def _last(output: str) -> dict[str, Any]:
    """Return the last result that a rank has written as a whole."""
    lines = [line for line in output.splitlines(keepends=True) if line.endswith("}\n")]
    return json.loads(lines[-1]) if lines else {}
