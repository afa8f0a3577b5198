"""The porter of an attempt: brings what the job needs, keeps it there, takes it away when nobody holds it."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.node.bell import ring
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.mounts.download import download
from holdfast.jobs.node.mounts.rclone import BucketMount
from holdfast.jobs.node.mounts.supply import Kind, Supply, read_supplies
from holdfast.jobs.node.plan import write_whole
from holdfast.jobs.place import database
from holdfast.jobs.records import Records
from holdfast.quantity import say_seconds
from holdfast.writeback import Mount, mount
from holdfast.writeback.status import has_uploader

HOLDERS, LOCK, THERE = "holders", "lock", "there"
"""In its folder: a pipe that keeps it while anybody holds its writing end; its lock; its word that all is
there, or why not."""
_LOOK_S = 1.0  # between two looks whether what was brought is still there
_SLICE_S = 0.2  # how long it waits for an uploader before it looks whether anybody still wants it
_PATIENCE_S = 300.0  # how long a store that fails is tried again, beside the store's own patience
_PAUSE_S = 2.0


def serve(folder: Path) -> None:
    """Bring, keep, take away; the caller holds the porter's lock.

    Args:
        folder: of the porter, in that of the attempt.

    Blocks: as long as anybody holds it.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    job = JobFolder(folder.parents[2])
    with Records(database(job.path.parents[1])) as records:
        owner = records.get(int(job.path.name)).task_id
    porter = Porter(folder, read_supplies(job), int(folder.parent.name), owner)
    try:
        porter.bring()
        porter.keep()
    except HoldfastError as error:
        say(str(error))
        write_whole(folder / THERE, json.dumps({"error": str(error)}))
    finally:
        porter.close()
        ring(job.bell)


def say(text: str) -> None:
    """Write a line into the log of the node that has started this process."""
    sys.stdout.write(f"holdfast: {time.strftime('%F %T')} {text}\n")
    sys.stdout.flush()


class Porter:
    """Whoever has the porter's lock.

    Args:
        folder: its own.
        supplies: what to bring.
        attempt: number of the attempt.
        owner: id of the job, under which write-back directories are mounted.
    """

    def __init__(self, folder: Path, supplies: list[Supply], attempt: int, owner: str) -> None:
        self._folder = folder
        self._supplies = supplies
        self._attempt, self._owner = attempt, owner
        self._caches: dict[Supply, Mount] = {}
        self._buckets: dict[Supply, BucketMount] = {}
        self._holders_fd = os.open(folder / HOLDERS, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A pipe that never had a writer does not tell that it has none.
        os.close(os.open(folder / HOLDERS, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    def bring(self) -> None:
        """Have everything there, and say so.

        Raises:
            HoldfastError: something cannot be had.
        """
        for supply in self._supplies:
            began_s = time.monotonic()
            if supply.kind is not Kind.COPY:  # a copy tells of itself
                say(f"{supply.place} is being mounted at {supply.key}")
            self._patiently(lambda supply=supply: self._bring_one(supply))
            if supply.kind is not Kind.COPY:
                say(f"{supply.place} is mounted at {supply.key}, {say_seconds(time.monotonic() - began_s)}")
        write_whole(self._folder / THERE, "{}")

    def keep(self) -> None:
        """Have everything stay there until nobody holds it.

        Blocks: until then.
        """
        troubles: dict[Supply, str] = {}
        while self.is_wanted(_LOOK_S):
            for supply in self._supplies:
                if self._is_there(supply):
                    troubles.pop(supply, None)
                    continue
                try:
                    say(f"{supply.place} is at {supply.key} no more, and is mounted again")
                    self._bring_one(supply)
                except HoldfastError as error:
                    if troubles.get(supply) != str(error):
                        say(str(error))
                    troubles[supply] = str(error)

    def close(self) -> None:
        """Take away what was mounted; uploaders go on by themselves until all is sent."""
        for bucket in self._buckets.values():
            bucket.close()
        for held in self._caches.values():
            held.close()
        os.close(self._holders_fd)

    def is_wanted(self, timeout_s: float = 0.0) -> bool:
        """Whether anybody holds it, until the time is over."""
        poll = select.poll()
        poll.register(self._holders_fd, 0)  # only the end of the last holder
        return not poll.poll(timeout_s * 1000)

    def _patiently(self, bring: Callable[[], None]) -> None:
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return bring()
            except RetryLater as error:
                if not self.is_wanted() or time.monotonic() > give_up_s:
                    raise
                say(f"{error} Trying again.")
                self.is_wanted(_PAUSE_S)

    def _bring_one(self, supply: Supply) -> None:
        if supply.kind is Kind.COPY:
            download(supply.place, Path(supply.path), tell=say, is_wanted=self.is_wanted)
        elif supply.kind is Kind.CACHE:
            self._mount_cache(supply)
        else:
            bucket = self._buckets.setdefault(
                supply, BucketMount(supply, self._folder / f"rclone-{Path(supply.path).name}.log")
            )
            bucket.open(self.is_wanted)

    def _mount_cache(self, supply: Supply) -> None:
        held = hold_cache(supply, self._owner, self._attempt, self.is_wanted)
        if (before := self._caches.pop(supply, None)) is not None:
            before.close()
        self._caches[supply] = held

    def _is_there(self, supply: Supply) -> bool:
        if supply.kind is Kind.CACHE:
            return supply in self._caches and has_uploader(Path(supply.path))
        return supply.kind is Kind.COPY or (supply in self._buckets and self._buckets[supply].lives)


def hold_cache(
    supply: Supply, owner: str, attempt: int, is_wanted: Callable[[], bool], *, fetch: bool = True
) -> Mount:
    """Mount a write-back directory, or join its uploader.

    Raises:
        HoldfastError: see `holdfast.writeback.mount`.

    Blocks: until it is ready, or nobody wants it any more.
    """
    held: list[Mount | HoldfastError] = []

    def make() -> None:
        try:
            held.append(
                mount(supply.path, supply.place, fetch=fetch, owner=owner, attempt=attempt, timeout_s=None)
            )
        except HoldfastError as error:
            held.append(error)

    # In a thread, since it may take as long as the bucket's retries, and this process may have to end.
    making = threading.Thread(target=make, daemon=True)
    making.start()
    while making.is_alive():
        making.join(_SLICE_S)
        if making.is_alive() and not is_wanted():
            raise RetryLater(f"The mount of {supply.place} was given up: nobody waits for it any more.")
    if isinstance(held[0], HoldfastError):
        raise held[0]
    return held[0]
