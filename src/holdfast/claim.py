"""Takes a home over: the run that it holds, and the next attempt's number, claimed for one trainer."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid

from holdfast.errors import Conflict, InvalidInput
from holdfast.format import names, run
from holdfast.keeper.commit import newest_attempt
from holdfast.restore.find import read_run
from holdfast.store.contract import Store


def claim_run(store: Store) -> str:
    """Id of the run of this home, whose document is made if the home is new.

    Raises:
        Corrupt: the home's documents are damaged, and nothing in it tells the run.
        RetryLater: the store failed.
    """
    found = read_run(store) or new_run()
    with contextlib.suppress(Conflict):  # another start was quicker: its run it is
        store.put(names.RUN, run.document(found), if_absent=True)
    there = read_run(store)
    assert there is not None
    return there.id


def new_run() -> run.Run:
    """A run that nobody has yet."""
    return run.Run(uuid.uuid4().hex, created_unix_s=time.time())


def claim_attempt(store: Store, run_id: str, *, world_size: int, trainer: int | None = None) -> int:
    """The next attempt's number, claimed: every attempt before it is fenced.

    Args:
        store: the home.
        run_id: the run that it holds.
        world_size: ranks of the attempt.
        trainer: its process id; this process by default.

    Raises:
        RetryLater: the store failed.
    """
    number = 1 + newest_attempt(store)
    host, pid = socket.gethostname(), os.getpid() if trainer is None else trainer
    while True:
        attempt = run.Attempt(number, run_id, world_size, host, pid, started_unix_s=time.time())
        try:
            store.put(names.attempt(number), run.document(attempt), if_absent=True)
        except Conflict:
            number += 1  # another start of this run was quicker
        else:
            return number


def check_run(store: Store, run_id: str) -> None:
    """Make a nearer tier one of the run, if it is new.

    Raises:
        InvalidInput: it holds another run.
        RetryLater: the store failed.
    """
    there = read_run(store)
    if there is not None and there.id != run_id:
        raise InvalidInput(
            f"{store.url} holds checkpoints of another run (expected {run_id}, found {there.id}), so it "
            "cannot be the local tier of this one. Nothing was written. Give local= a folder of its own for "
            "each run."
        )
    with contextlib.suppress(Conflict):
        store.put(names.RUN, run.document(run.Run(run_id, created_unix_s=time.time())), if_absent=True)


def copy_claim(home: Store, near: Store, number: int) -> None:
    """Have a claim stand in a nearer tier too, so that it fences there what does not look at home.

    Raises:
        RetryLater: a store failed.
    """
    with contextlib.suppress(Conflict):
        near.put(names.attempt(number), home.get(names.attempt(number)), if_absent=True)
