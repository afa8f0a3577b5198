"""Runner of the training scripts of adapters' tests, alone or as several ranks."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nursery import Child, shared
from servers import reserve_port

LIMIT_S = 600
_TESTS = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """Ranks of a process group that run a script."""

    children: list[Child]
    folder: Path
    """Folder of their output, and of what the test puts there."""

    def errors(self) -> str:
        """Return what all ranks have written to stderr."""
        numbers = range(len(self.children))
        return "\n".join((self.folder / f"errors-{rank}").read_text() for rank in numbers)

    def kill(self) -> None:
        """Kill the ranks that are left, as a launcher does after the end of one."""
        for one in self.children:
            one.kill()
            one.wait()


@contextlib.contextmanager
def started_ranks(
    command: Sequence[object],
    count: int,
    *,
    env: Mapping[str, str] | None = None,
    is_launched: bool = True,
    victim: int = 0,
    victim_env: Mapping[str, str] | None = None,
) -> Iterator[StartedRanks]:
    """Start ranks of a script, and kill those that are left at the end of the block.

    `command` is the path of the script and its arguments. With `is_launched`, ranks have the variables that a
    launcher sets.
    """
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_TESTS))))
    port = str(reserve_port())
    with tempfile.TemporaryDirectory() as folder:
        started = StartedRanks([], Path(folder))
        try:
            for rank in range(count):
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
                own = {**os.environ, "PYTHONPATH": paths, "MASTER_PORT": port}
                if is_launched:
                    own |= {"MASTER_ADDR": "127.0.0.1", **{key: str(one) for key, one in numbers.items()}}
                own |= {**(env or {}), **((victim_env or {}) if rank == victim else {})}
                files = started.folder / f"output-{rank}", started.folder / f"errors-{rank}"
                words = [str(word) for word in command]
                started.children.append(shared().start(words, files[0], errors=files[1], env=own))
            yield started
        finally:
            started.kill()


@dataclass(frozen=True, slots=True)
class EndedRank:
    """What a rank left at its end."""

    status: int
    output: str
    errors: str

    def last(self) -> Any:
        """Return what the rank has printed last, from JSON."""
        return json.loads(self.output.splitlines()[-1])


def run_ranks(command: Sequence[object], count: int = 1, *, victim: int = 0, **how: Any) -> list[EndedRank]:
    """Run ranks of a script to their end; if one is killed, the others are too, as a launcher does."""
    with started_ranks(command, count, victim=victim, **how) as ranks:
        statuses = [0] * count
        for rank in sorted(range(count), key=lambda rank: rank != victim):  # others may wait for the victim
            statuses[rank] = ranks.children[rank].wait(LIMIT_S)
            if statuses[rank] == -9:
                ranks.kill()
        texts = [(ranks.folder / f"errors-{rank}").read_text() for rank in range(count)]
        said = [one.said() for one in ranks.children]
        return [EndedRank(*row) for row in zip(statuses, said, texts, strict=True)]


def train(script: Path, folder: Path, *, status: int = 0, **plan: Any) -> dict[str, Any]:
    """Train in a process of its own, and return the end of the run; {} if the process is to fail."""
    return train_ranks(script, folder, 1, statuses=[status], **plan)[0]


def status_of(script: Path, folder: Path, **plan: Any) -> int:
    """Train in a process of its own, and return its exit status."""
    with started_ranks([script, folder, json.dumps(plan)], 1, is_launched=False) as ranks:
        return ranks.children[0].wait(LIMIT_S)


def names_of_states(folder: Path) -> list[str]:
    """Return the names of all files outside of a home, and of the steps in it."""
    inside = [path.relative_to(folder) for path in folder.rglob("*")]
    return sorted(
        str(path) for path in inside if "holdfast" not in path.parts or path.match("holdfast/step-*")
    )


def train_ranks(
    script: Path, folder: Path, count: int, *, statuses: Sequence[int] | None = None, **plan: Any
) -> list[dict[str, Any]]:
    """Train on ranks of one process group, and return the end of the run by rank, {} of those that failed.

    By default all are to succeed. Of a rank that is to be killed, only its own status is checked.
    """
    expected = list(statuses or [0] * count)
    is_killed = -9 in expected
    victim = expected.index(-9) if is_killed else 0
    ended = run_ranks([script, folder, json.dumps(plan)], count, victim=victim, is_launched=count > 1)
    errors = "\n".join(one.errors for one in ended)
    if is_killed:
        assert ended[victim].status == -9, errors
        return [{} for _ in ended]
    assert [one.status for one in ended] == expected, errors
    return [{} if one.status else one.last() for one in ended]


@dataclass(frozen=True, slots=True)
class UsedSamples:
    """Samples that the starts of a run have trained on, by epoch and batch."""

    by_batch: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def add(self, folder: Path, pattern: str) -> None:
        """Add the samples of a start from its files. A batch that is trained again replaces the first."""
        found: dict[tuple[int, int], list[int]] = {}
        for path in folder.glob(pattern):
            for line in path.read_text().splitlines():
                epoch, number, *samples = map(int, line.split())
                found.setdefault((epoch, number), []).extend(samples)
            path.unlink()
        self.by_batch.update(found)

    def of_epoch(self, epoch: int) -> list[int]:
        """Return the samples of an epoch in ascending order."""
        return sorted(one for (of, _), batch in self.by_batch.items() if of == epoch for one in batch)

    def check(self, num_samples: int, num_epochs: int = 3) -> None:
        """Check that each epoch had each sample once."""
        for epoch in range(num_epochs):
            assert self.of_epoch(epoch) == list(range(num_samples)), epoch
