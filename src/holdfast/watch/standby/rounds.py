"""Rounds of the ranks of a training: each ends for all ranks when one dies, or when all are complete."""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import socket
import sys
import time
from typing import NoReturn

from msgspec import Struct
from torch.distributed import (  # its documented names, which torch does not list as public
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from holdfast.errors import InvalidInput
from holdfast.system.environment import read_integer

_ANSWER = datetime.timedelta(minutes=5)  # longest wait for a rank that comes to its next round
_ROUND = datetime.timedelta(days=20)  # a store cannot wait for longer, see poll(2)
COMPLETE = "complete"
_AGENT, _RESTARTS = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"


class Launch(Struct, frozen=True):
    """Facts of a launcher such as torchrun about its start of all ranks."""

    rank: int
    world_size: int
    address: str
    port: int
    has_store: bool  # the launcher serves it, so it outlives every rank
    name: str  # of the start, among all in the store

    @classmethod
    def read(cls) -> Launch:
        """Return the facts in the environment of this process."""
        world_size = read_integer("WORLD_SIZE", 1, minimum=1)
        if world_size > 1 and not os.environ.get("MASTER_ADDR"):
            raise InvalidInput(
                f"supervise() reads MASTER_ADDR, MASTER_PORT and RANK, as WORLD_SIZE is {world_size}, and "
                "MASTER_ADDR is not set. Set it to the address of rank 0's host, or use torchrun."
            )
        return cls(
            rank=read_integer("RANK", 0),
            world_size=world_size,
            address=os.environ.get("MASTER_ADDR", ""),
            port=read_integer("MASTER_PORT", 0),
            has_store=os.environ.get(_AGENT) == "True",
            name=f"{world_size}.{read_integer(_RESTARTS, 0)}",
        )


class Rounds:
    """Connection of one process to the store with the rounds of all ranks. Not for several threads."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        is_alone, address = launch.world_size == 1, (launch.address, launch.port)
        store = HashStore() if is_alone else TCPStore(*address, is_master=False, timeout=_ANSWER)
        self._store = PrefixStore(f"holdfast/rounds/{launch.name}", store)

    def count_start(self) -> int:
        """Return how many supervisors this rank has had in the store, with this one."""
        return self._store.add(f"starts/{self._launch.rank}", 1)

    def end(self, number: int, outcome: str) -> str:
        """End a round, and return its outcome: that of the first process to end it."""
        found = self._store.compare_set(f"outcome/{number}", "", outcome).decode(errors="replace")
        self._store.compare_set(f"port/{number}", "", "0")  # a rank may wait for it
        return found

    def complete(self, number: int) -> str:
        """Count this rank as complete, and return the outcome of the round once all are, or one has died."""
        if self._store.add(f"complete/{number}", 1) == self._launch.world_size:
            return self.end(number, COMPLETE)
        return self.wait(number)

    def wait(self, number: int) -> str:
        """Return the outcome of a round, once it has one.

        Raises:
            RuntimeError: the store has ended, with the host that serves it.
        """
        key = f"outcome/{number}"
        self._store.wait([key], _ROUND)
        return self._store.get(key).decode(errors="replace")

    def next_after(self, number: int) -> int:
        """Return the first round from `number` on that has no outcome."""
        while self._store.check([f"outcome/{number}"]):
            number += 1
        return number

    def meet(self, number: int) -> bool:
        """Have torch's `init_process_group` find the ranks of this round. Return False if it has ended.

        Each round has a port, and so a store of torch, of its own: what the ranks of an earlier round have
        written there, such as their addresses, is not read.

        Blocks: until rank 0 is in this round.
        """
        key = f"port/{number}"
        if self._launch.rank == 0:
            self._store.compare_set(key, "", str(_free_port()))
        port = self._store.get(key).decode()
        os.environ |= {"MASTER_PORT": port, _AGENT: "False"}
        return port != "0"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def serve_store(launch: Launch) -> NoReturn:
    """Serve the store of the rounds until this process is killed."""
    store = TCPStore(launch.address, launch.port, is_master=True, wait_for_workers=False)
    while store.port:
        time.sleep(3600)
    os._exit(1)


class RankLink:
    """Link of a supervisor and the process of its rank: shared memory, and a stream of names of modules."""

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, 9)
        self.modules, self._sender = socket.socketpair()

    @property
    def round(self) -> int:
        """Round that the process of the rank is in."""
        return int.from_bytes(self._bytes[:8], "little")

    @property
    def has_stepped(self) -> bool:
        """True if the process of the rank has completed a step in this round."""
        return self._bytes[8] == 1

    def begin(self, number: int) -> None:
        """Begin a round, in the process of the rank."""
        self._bytes[:] = number.to_bytes(8, "little") + b"\0"

    def step(self) -> None:
        """Note that a step is complete."""
        self._bytes[8] = 1

    def send_modules(self) -> None:
        """Send the names of the modules that this process has imported, and no more afterwards."""
        self._sender.settimeout(1.0)  # a supervisor that is stopped holds up nothing for longer
        with contextlib.suppress(OSError):  # those of an earlier process of the rank have been sent
            self._sender.sendall("\n".join(sys.modules).encode())
            self._sender.shutdown(socket.SHUT_WR)
