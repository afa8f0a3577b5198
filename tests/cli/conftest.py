"""A home with a history, and the command line called in this process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format import names
from holdfast.checkpoint.store import open_store
from holdfast.cli import main
from jobs.conftest import harness as jobs
from making import CREATED_UNIX_S, make_checkpoint, make_home


@dataclass(frozen=True)
class Result:
    """Output and exit status of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output as JSON."""
        return json.loads(self.out)

    def printed(self, *texts: str, status: int = 0) -> Result:
        """Check the exit status, and that the output has some texts."""
        assert self.status == status, self.err
        for text in texts:
            assert text in self.out
        return self

    def refused(self, *texts: str, status: int = 2) -> Result:
        """Check the exit status, and that the errors have some texts."""
        assert self.status == status, self.err
        for text in texts:
            assert text in self.err
        return self


Command = Callable[..., Result]
__all__ = ["jobs"]


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in this process."""

    def call(*words: object) -> Result:
        capsys.readouterr()
        status = main([str(word) for word in words])
        result = capsys.readouterr()
        return Result(status, result.out, result.err)

    return call


def tensors_at(number: int) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of two ranks: replicated tensors spread over both, and per-rank generator states."""
    return [
        {
            "model.weight": torch.full((30, 4), float(number)),
            "rng.torch": torch.full((16,), 1, dtype=torch.uint8),
        },
        {"model.bias[0]": torch.arange(5) * number, "rng.torch": torch.full((16,), 2, dtype=torch.uint8)},
    ]


def save(
    home: Path, step: int, attempt: int = 1, *, base: tuple[int, int] | None = None, commit: bool = True
) -> None:
    """Make one checkpoint."""
    groups = [{"lr": 0.5, "betas": (0.9, 0.95)}]
    make_checkpoint(
        open_store(home),
        step,
        attempt,
        tensors_at(step + attempt),
        per_rank=["rng.torch"],
        tied={"model.head": "model.weight"},
        values=[{"epoch": step // 100, "optimizer": {"groups": groups}, "seed": rank} for rank in range(2)],
        base=base,
        commit=commit,
        created_unix_s=CREATED_UNIX_S + step,
    )


@pytest.fixture(scope="session")
def first_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the home that each test copies, since copying needs no fsync."""
    place = tmp_path_factory.mktemp("first") / "run"
    make_home(open_store(place), attempts=(1, 2))
    for step in (100, 200, 300):
        save(place, step)
    save(place, 250, 2, base=(1, 200))
    save(place, 300, 2, base=(1, 200))
    save(place, 400, 2, base=(1, 200), commit=False)
    return place


@pytest.fixture
def home(first_home: Path, tmp_path: Path) -> Path:
    """Attempt 1 saved 100, 200, 300; attempt 2 began from 200 and saved 250, 300; 400 was never completed."""
    return shutil.copytree(first_home, tmp_path / "run")


def append_event(
    home: Path, attempt: int, t: float, event: str, step: int | None, *, rank: int = 0, **more: object
) -> None:
    """Append a line to the history of a rank."""
    line = {"t": t, "event": event, "step": step, "attempt": attempt, "rank": rank, **more}
    open_store(home).append(names.history(attempt, rank), json.dumps(line).encode() + b"\n")


def run_on_terminal(*words: object) -> tuple[str, bytes]:
    """Run a command whose stderr is a terminal. Return stdout, and what is drawn on the terminal."""
    pty = pytest.importorskip("pty")
    person, terminal = pty.openpty()
    drawn = bytearray()

    def look() -> None:
        with contextlib.suppress(OSError):  # how a terminal ends
            while seen := os.read(person, 1 << 16):
                drawn.extend(seen)

    looking = threading.Thread(target=look)  # beside it: a terminal that nobody reads from fills up
    looking.start()
    command = [sys.executable, "-m", "holdfast.cli", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, text=True, check=False)
    os.close(terminal)
    looking.join()
    os.close(person)
    assert done.returncode == 0
    return done.stdout, bytes(drawn)


def runs_without_torch(*words: object) -> None:
    """Run a command in a process of its own, and check that it succeeds without importing torch."""
    code = (
        "import sys; from holdfast.cli import main; s = main(sys.argv[1:]); print('torch' in sys.modules, s)"
    )
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["False 0"], done.stderr


def flip(path: Path, at: int = -1) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
