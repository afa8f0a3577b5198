"""A world of real gloo ranks that lives as long as its tests and runs one function after the other."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forkserver import forkserver

LIMIT_S = 600


class RankDied(Exception):
    """A rank has ended without an answer."""


class World:
    """Ranks that each wait for a function to run; one rank alone has no process group.

    Args:
        world_size: number of ranks.
        folder: where the ranks meet; used by this world alone.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self.num_started = 0  # functions
        pipes = [forkserver().Pipe() for _ in range(world_size)]
        self._ends = [ours for ours, _ in pipes]
        self.processes = [
            forkserver().Process(target=_serve, args=(rank, world_size, str(folder / "store"), theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def start(self, body: Callable[..., Any], *args: Any) -> None:
        """Have every rank run `body(rank, *args)`."""
        self.num_started += 1
        env = {"HOLDFAST_RUNTIME_DIR": os.environ["HOLDFAST_RUNTIME_DIR"]}
        for end in self._ends:
            end.send((body, args, env))

    def finish(self, *, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the answers of the ranks.

        Raises:
            RankDied: a rank has ended, or does not answer.
            AssertionError: a rank's function raised; the traceback is in the message.
        """
        answers = []
        for rank in range(self.world_size) if ranks is None else ranks:
            try:
                if not self._ends[rank].poll(LIMIT_S):
                    raise RankDied(f"rank {rank} of {self.world_size} did not answer in {LIMIT_S} s")
                answers.append(self._ends[rank].recv())
            except EOFError as error:
                self.processes[rank].join(LIMIT_S)
                raise RankDied(f"rank {rank} ended with {self.processes[rank].exitcode}") from error
        failed = [f"rank {rank}:\n{text}" for rank, (is_good, text) in enumerate(answers) if not is_good]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """`start` and `finish`."""
        self.start(body, *args)
        return self.finish()

    def close(self) -> None:
        """End the ranks."""
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(LIMIT_S)
            if process.is_alive():
                process.kill()
                process.join()

    def kill(self) -> None:
        """SIGKILL every rank: after a test that has broken the world."""
        for process in self.processes:
            process.kill()
        self.close()


def _serve(rank: int, world_size: int, store: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    import holdfast

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which close the pipe
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # no advice on fast redistribution
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if world_size > 1:
        meeting = FileStore(store, world_size)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size)
    while True:
        try:
            body, args, env = end.recv()
        except EOFError:
            break
        os.environ.update(env)
        try:
            answer = True, body(rank, *args)
        except BaseException:  # noqa: BLE001 - the test raises it
            answer = False, traceback.format_exc()
        end.send(answer)
    sys.stdout.flush()
    holdfast.hard_exit()
