"""Trials of a training that hangs: its processes, its history, and the hang that was recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Self

from holdfast.errors import HoldfastError
from holdfast.watch.hang.incidents import HangIncident, list_hangs
from making import history_lines
from nursery import Child, Nursery
from servers import reserve_port
from stage.training import wait_until

TRAINING = Path(__file__).with_name("training.py")


class Trial:
    """One run of the training."""

    def __init__(self, folder: Path, nursery: Nursery, *, world_size: int = 1) -> None:
        self.folder, self.home, self.world_size = folder, folder / "home", world_size
        self._nursery = nursery
        self.ranks: list[Child] = []

    def start(self, way: str, *, odd: int = 0, env: dict[str, str] | None = None, **options: Any) -> None:
        """Start all ranks."""
        self.start_ranks([TRAINING, way, odd, self.home, json.dumps(options)], env=env or {})

    def start_ranks(self, words: list[Any], *, num_hosts: int = 1, env: Mapping[str, str] = {}) -> None:
        """Start all ranks with arguments. Ranks of different hosts have different runtime folders."""
        world = {"WORLD_SIZE": str(self.world_size), "OMP_NUM_THREADS": "1"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
        for rank in range(self.world_size):
            folder = str(self.folder / f"host-{rank * num_hosts // self.world_size}")
            own = {"RANK": str(rank), "HOLDFAST_RUNTIME_DIR": folder}
            output = self.folder / f"output-{rank}.txt"
            child = self._nursery.start([*map(str, words)], output, env={**os.environ, **world, **own, **env})
            self.ranks.append(child)

    def lines(self, *events: str) -> list[dict[str, Any]]:
        """Return the lines of the history about some events."""
        try:
            return history_lines(self.home, *events)
        except HoldfastError:
            return []

    def hang(self) -> HangIncident:
        """Wait until every rank has recorded a hang, and return it."""
        self.wait_until(lambda: len({one["rank"] for one in self.lines("hang")}) == self.world_size)
        (found,) = list_hangs(self.lines("hang"))
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true. Fails if a rank exits before."""

        def is_true() -> bool:
            is_met = condition()
            assert is_met or all(one.ended.empty() for one in self.ranks), self.printed()
            return is_met

        wait_until(is_true)

    def printed(self) -> str:
        """Return what all ranks have printed."""
        return "\n".join(one.said() for one in self.ranks)

    def finish(self) -> None:
        """Wait until all ranks have exited without an error."""
        for one in self.ranks:
            assert one.wait() == 0, one.said()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill all ranks that are left."""
        for one in self.ranks:
            one.kill()
        for one in self.ranks:
            one.wait()
