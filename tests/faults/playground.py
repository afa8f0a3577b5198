"""One run under test: start it, kill it, wait for its progress, and check all that must hold afterwards."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

import holdfast
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from nursery import END_TIMEOUT_S, Child, Nursery
from servers import reserve_port

TOTAL = 24
ENDLESS = ("--pause-at", str(TOTAL - 1))
"""Options of a trainer that does not end before it is killed, however late that happens."""
TRAINER = Path(__file__).resolve().parent / "trainer.py"


class Playground:
    """A home, its runtime folder, and the processes that work on it."""

    def __init__(self, folder: Path, nursery: Nursery, *options: str) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.local = folder / "local"  # for runs that are started with --local
        self.runtime = folder / "runtime"
        self.nursery, self.options = nursery, options  # of each trainer
        self.num_started = 0

    # -- processes ------------------------------------------------------------------------------------------

    def start(self, *options: str, total: int = TOTAL, **env: str) -> Child:
        """Start one trainer."""
        self.num_started += 1
        output = self.folder / f"output-{self.num_started}.txt"
        arguments = [str(TRAINER), str(self.home), str(total), "--logs", str(self.folder)]
        arguments += [*self.options, *options]
        env = {**os.environ, "HOLDFAST_RUNTIME_DIR": str(self.runtime), **env}
        return self.nursery.start(arguments, output, env=env)

    def start_ranks(
        self, world_size: int, *options: str, envs: Mapping[int, Mapping[str, str]] = MappingProxyType({})
    ) -> list[Child]:
        """Start one trainer per rank of a gloo world, some with an environment of their own."""
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
        children: list[Child] = []
        for rank in range(world_size):
            env = {**world, "WORLD_SIZE": str(world_size), "RANK": str(rank), **envs.get(rank, {})}
            children.append(self.start(*options, **env))  # pyright: ignore[reportArgumentType] - no `total`
        return children

    def finish_ranks(self, *options: str) -> list[Child]:
        """Run two ranks to the end."""
        children = self.start_ranks(2, *options)
        for child in children:
            status = child.wait()
            assert status == 0, f"ended with {status}:\n{child.said()}"
        return children

    def finish(self, *options: str, total: int = TOTAL, **env: str) -> Child:
        """Start a trainer that nothing happens to, and see it finish."""
        child = self.start(*options, total=total, **env)
        status = child.wait()
        assert status == 0, f"ended with {status}:\n{child.said()}"
        return child

    def run_until_killed(self, point: str, **env: str) -> None:
        """Run a trainer that is killed at a failpoint, and wait until its keepers have ended."""
        self.start("--step-s", "0.01", total=TOTAL, HOLDFAST_KILL_AT=point, **env).wait()
        self.wait_for_keepers()

    def let_go(self, step: int) -> None:
        """Let trainers go on that pause at a step."""
        (self.folder / f"go-{step}").touch()

    def keepers(self) -> list[psutil.Process]:
        """The living keepers of this home."""
        return keepers_of(self.runtime)

    def kill_keepers(self) -> int:
        """SIGKILL every keeper; how many there were."""
        return sum(map(kill, self.keepers()))

    # -- waiting --------------------------------------------------------------------------------------------

    def wait_for(self, what: Callable[[], object], name: str) -> None:
        """Wait until `what()` is true."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while not what():
            assert time.monotonic() < deadline, f"waited in vain for {name}"
            self.pause(0.005)

    def num_steps(self) -> int:
        """Steps that all attempts together have completed, those made twice counted twice."""
        log = self.folder / "progress.log"
        return log.read_text().count("\n") if log.exists() else 0

    def wait_for_steps(self, num_steps: int, child: Child | None = None) -> None:
        """Wait until training has completed `num_steps` steps, or until `child` has ended."""
        self.wait_for(
            lambda: self.num_steps() >= num_steps or (child is not None and not child.ended.empty()),
            f"{num_steps} steps",
        )

    def pause(self, seconds: float) -> None:
        """Let a random moment pass; nothing may depend on its length."""
        threading.Event().wait(seconds)

    def wait_for_keepers(self) -> None:
        """Wait until every keeper has ended."""
        self.wait_for(lambda: not self.keepers(), "the keepers to end")

    # -- what must hold -------------------------------------------------------------------------------------

    def complete(self, place: Path | str | None = None) -> list[tuple[int, int]]:
        """(attempt, step) of every checkpoint that counts as complete in home or `place`, newest first."""
        return list(candidates(list_home(open_store(str(place or self.home)))))

    def has_event(self, event: str, place: Path | None = None) -> bool:
        """Return True if the history in home or `place` has an event of this kind."""
        logs = (place or self.home).glob("history/*.jsonl")
        return any(f'"event":"{event}"' in log.read_text() for log in logs)

    def check_all_complete_verify(
        self, place: Path | str | None = None, *, damaged: tuple[int, int] | None = None
    ) -> int:
        """Every checkpoint that home or `place` calls complete verifies; how many there are.

        A keeper that outlives its trainer may still be retaining: what it has deleted meanwhile is not called
        complete any more.

        Args:
            damaged: attempt and step of one that a test has damaged. What was passed over is not deleted.
        """
        num_good = 0
        for attempt, step in self.complete(place):
            if (attempt, step) == damaged:
                continue
            problems = self._problems(step, attempt, place or self.home)
            num_good += not problems
            is_called_complete = (attempt, step) in self.complete(place)
            assert not (problems and is_called_complete), f"step {step} of attempt {attempt}: {problems}"
        return num_good

    def _problems(self, step: int, attempt: int, place: Path | str) -> list[str]:
        try:
            return [str(one) for one in holdfast.open(place, step=step, attempt=attempt).verify().problems]
        except holdfast.NotFound as error:
            return [str(error)]

    def final(self) -> str:
        """Digest of the state at the end of training."""
        return (self.folder / "final.txt").read_text()

    def check_finishes_like(self, expected: str, *options: str, said: str = "restored step") -> None:
        """A new attempt finishes, with the weights of a run that nothing happened to."""
        child = self.finish(*options)
        assert said in child.said(), child.said()
        assert self.final() == expected
        assert self.check_all_complete_verify() > 0


def flip_bit(path: Path, position: int | None = None) -> None:
    """Flip a bit of a byte, by default of the one in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 0x10
    path.write_bytes(content)


def kill(process: psutil.Process | Child) -> bool:
    """SIGKILL a process, unless it has ended already."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def end(children: list[Child]) -> None:
    """Kill what is left, as a launcher does when one rank has died."""
    for child in children:
        child.kill()
    for child in children:
        child.wait()


def kill_host_at_random(
    playground: Playground, draw: random.Random, *options: str, place: str | None = None, **env: str
) -> None:
    """Kill a trainer at a random moment, often its keeper too; sometimes the disk of its host is lost."""
    child = playground.start("--step-s", "0.01", "--every", "1", *options, total=TOTAL, **env)
    playground.wait_for_steps(playground.num_steps() + draw.randint(0, 4), child)
    playground.pause(draw.random() * 0.04)
    is_host_lost = draw.random() < 0.35
    if is_host_lost or draw.random() < 0.5:
        playground.kill_keepers()
    child.kill()
    assert child.wait() in (0, -signal.SIGKILL), child.said()
    if is_host_lost:
        playground.kill_keepers()
        playground.wait_for_keepers()
        shutil.rmtree(playground.local, ignore_errors=True)
    playground.check_all_complete_verify(place)


def check_random_rank_kills(playground: Playground, expected: str, seed: int, num_kills: int) -> None:
    """Kill one of two ranks, and perhaps keepers, at random moments; then let the run finish."""
    draw = random.Random(seed)
    for _ in range(num_kills):
        children = playground.start_ranks(2, "--step-s", "0.01", "--every", "1")
        wanted = playground.num_steps() + draw.randint(1, 3)
        playground.wait_for_steps(wanted, children[0])
        playground.pause(draw.random() * 0.02)
        if draw.random() < 0.5:
            kill(draw.choice([*playground.keepers(), *children]))
        if draw.random() < 0.3:
            playground.kill_keepers()
        draw.choice(children).kill()
        end(children)
        playground.check_all_complete_verify()
    playground.finish_ranks()
    assert playground.final() == expected
    assert playground.check_all_complete_verify() > 0


def keepers_of(runtime: Path) -> list[psutil.Process]:
    """The living keepers that leave their traces in a runtime folder."""
    mine = f"HOLDFAST_RUNTIME_DIR={runtime}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if b"holdfast.checkpoint.keeper" not in (place / "cmdline").read_bytes().split(b"\0"):
                continue  # a zombie has no command line
            if mine in (place / "environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(int(place.name)))
        except (OSError, psutil.NoSuchProcess):
            continue  # it ended while we looked
    return found
