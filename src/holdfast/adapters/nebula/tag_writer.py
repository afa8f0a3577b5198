"""Settings and memory of a session, its ranks, and the writer of the tags that they complete together."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from msgspec import Struct
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistError, distributed_c10d
from torch.distributed.distributed_c10d import Store

from holdfast.adapters.kit.run import NO_NOTICES
from holdfast.adapters.kit.store_ranks import StoreRanks, wait_for
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.home.claim import claim_run
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.ranks import world
from holdfast.checkpoint.run import Checkpointer
from holdfast.checkpoint.run.options import Home, Limits, Local
from holdfast.checkpoint.state.entry import per_rank
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.factory import absolute_place
from holdfast.errors import HoldfastError, InvalidInput, RetryLater, SaveWarning, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.documents import Count, decode_as, to_plain
from holdfast.system.environment import read_integer
from holdfast.system.privacy import is_unshared
from holdfast.system.units import parse_bytes, parse_duration

_RUN = re.compile(r"[0-9A-Za-z_-]{1,64}")
RANKS_S = 600.0
"""Limit of the wait for other ranks that begin to save together."""
PATH = "NEBULA_PERSISTENT_STORAGE_PATH"
INTERVAL = "NEBULA_PERSISTENT_TIME_INTERVAL"
LOCAL = "HOLDFAST_LOCAL"


class Settings(Struct, frozen=True):
    """Home, nearer tier and interval of a session."""

    home: str
    interval_s: float | None  # between two checkpoints that are copied to home; None: every one is
    keep_local: int
    local: str | None  # folder for this run only
    local_root: str | None  # folder of the host with one folder per run


def make_settings(
    path: Any, interval: Any, retention: Any, local: Any, environ: Mapping[str, str]
) -> Settings:
    """Return the settings from arguments and the environment."""
    home = parse_location(environ.get(PATH) if path is None else path)
    given = environ.get(INTERVAL) if interval is None else interval
    seconds = None
    if given is not None and given != "":
        with contextlib.suppress(TypeError, ValueError):  # else it may have a unit
            given = float(given)
        seconds = None if given == 0 else parse_duration(given, "persistent_time_interval")
    if isinstance(retention, bool) or not isinstance(retention, int) or retention < 1:
        raise InvalidInput(f"num_of_version_in_retention must be 1 or more, not {retention!r}.")
    root = environ.get(LOCAL)
    if root is None and seconds is not None:
        root = str(Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}")
    return Settings(home, seconds, retention, None if local is None else parse_location(local), root)


def parse_location(path: Any) -> str:
    """Return the absolute path or URL of a location. A tuple of one path is accepted with a warning."""
    if isinstance(path, tuple) and len(path) == 1:
        message = (
            f"The path is a tuple, {path!r}, because a comma follows it. Its only element is used. Remove "
            "the comma."
        )
        warn(message, SaveWarning)
        path = path[0]
    if path is None or path == "":
        raise InvalidInput(
            "The location of checkpoints is missing, so nothing can be saved. Call init(path), or "
            f"set {PATH} to a folder or to a URL such as s3://BUCKET/RUN."
        )
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidInput(f"persistent_storage_path must be a path or URL, not {path!r}.")
    return absolute_place(path)


VARIABLE = "NEBULA_MEMORY_BUFFER_SIZE"
_MIN_BYTES = 64 << 20


def memory_limit(environ: Mapping[str, str], available_bytes: int) -> int:
    """Return the bytes of memory that one process of this node may use for its saves.

    If a limit is set, several processes share one half of it, and a single one has all of it. Without a
    limit, they share half of the memory that is available.
    """
    processes, limit = environ.get("LOCAL_WORLD_SIZE", "1"), environ.get(VARIABLE)
    if not processes.isdecimal() or int(processes) < 1:
        raise InvalidInput(f"LOCAL_WORLD_SIZE must be a number of processes, not {processes!r}.")
    count = int(processes)
    if not limit:
        return max(available_bytes // 2 // count, _MIN_BYTES)
    num_bytes = parse_bytes(int(limit) if limit.isdecimal() else limit, VARIABLE)
    return num_bytes if count == 1 else num_bytes // 2 // count


def local_folder(settings: Settings, run: str | None) -> str | None:
    """Return the folder of the nearer tier, or None. It is made in that of the host if a run needs it."""
    if settings.local is not None:
        return settings.local
    if settings.interval_s is None or settings.local_root is None or run is None:
        return None
    root = Path(settings.local_root).expanduser()
    with contextlib.suppress(OSError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.is_symlink() and root.lstat().st_uid == os.geteuid():
            root = root.resolve()
        if is_unshared(root):
            return str(root.resolve() / (run if _RUN.fullmatch(run) else digest(run.encode())))
    warn(
        f"{root} cannot be used as this user's folder for nearer copies, so checkpoints are saved "
        f"directly to {settings.home}. Set HOLDFAST_LOCAL to a folder on a fast disk of this host.",
        SaveWarning,
    )
    return None


_LEAVE_LIMIT = datetime.timedelta(seconds=30)


class TagPlan(Struct, frozen=True):
    """Plan of how a tag becomes a checkpoint. The rank that completes the tag decides it for all."""

    members: tuple[int, ...]  # ranks whose files are in the checkpoint
    step: int
    begins: bool  # starts a new attempt
    base: int | None  # step that a new attempt continues
    to_home: bool  # copied to home, because the interval has passed


class TagCoordinator:
    """Counters and values in the store of the process group.

    Without a group, they are in this process's memory.
    """

    def __init__(self, home: str, number: int) -> None:
        self.rank, self.world_size = world()
        # Kept as long as this object: on the rank that serves the store, it ends with its last reference.
        self._default = distributed_c10d._get_default_store() if self.world_size > 1 else None
        shared: Any = self._default
        # A new connection, so that training's own is not blocked.
        self.store: Store = HashStore() if shared is None else getattr(shared, "clone", lambda: shared)()
        self.name = f"holdfast/nebula/{digest(home.encode())[:12]}/{number}"

    def join(self, tag: str) -> None:
        """Register this rank as a member of a tag."""
        self.store.set(f"{self.name}/{tag}/by/{self.rank}", "")

    def count(self, tag: str) -> int:
        """Count one more file of a tag; return the number of files that all ranks have saved."""
        number = self.store.add(f"{self.name}/{tag}/files", 1)
        self.store.set(f"{self.name}/{tag}/file/{number}", str(self.rank))
        return number

    def savers(self, tag: str, num_files: int) -> tuple[int, ...]:
        """Return the ranks that saved the first `num_files` files of a tag.

        Ranks that were late are not included.
        """
        ranks: set[int] = set()
        for number in range(1, num_files + 1):
            rank = wait_for(self.store, f"{self.name}/{tag}/file/{number}", _LEAVE_LIMIT.total_seconds())
            if rank is None:
                raise RetryLater(
                    f"A rank has died while it was counting file {number} of {tag}. Nothing was saved."
                )
            ranks.add(int(rank))
        return tuple(sorted(ranks))

    def files(self, tag: str) -> int:
        """Return the number of files of a tag that all ranks have saved so far."""
        return self.store.add(f"{self.name}/{tag}/files", 0)

    def members(self, tag: str) -> tuple[int, ...]:
        """Return the ranks that have joined a tag so far."""
        return tuple(r for r in range(self.world_size) if self.store.check([f"{self.name}/{tag}/by/{r}"]))

    def propose(self, tag: str, plan: TagPlan) -> TagPlan:
        """Propose a plan for a tag; return the plan that a rank proposed first."""
        self.store.compare_set(f"{self.name}/{tag}/plan", "", json.dumps(to_plain(plan)))
        return self.plan(tag) or plan

    def plan(self, tag: str) -> TagPlan | None:
        """Return the plan for a tag, or None."""
        text = self._value(f"{self.name}/{tag}/plan")
        return decode_as(TagPlan, text, "the plan for a tag") if text else None

    def _value(self, key: str) -> bytes:
        return self.store.get(key) if self.store.check([key]) else b""

    def claim_run(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that save in this run: `members`, unless a rank has claimed it before."""
        text = self.store.compare_set(f"{self.name}/members", "", json.dumps(members))
        return decode_as(tuple[Count, ...], text, "the ranks that save")

    def leave(self, members: tuple[int, ...]) -> None:
        """Wait until this rank may exit: the first rank serves the store, so it leaves last."""
        if len(members) < 2:
            return
        with contextlib.suppress(DistError):  # the rank that served the store has exited
            self.store.set(f"{self.name}/left/{self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"{self.name}/left/{rank}" for rank in members], _LEAVE_LIMIT)

    def publish(self, key: str, number: int | None) -> None:
        """Publish a value for all ranks, replacing the last one."""
        self.store.set(f"{self.name}/value/{key}", "" if number is None else str(number))

    def published(self, key: str) -> int | None:
        """Return a value that a rank has published, or None."""
        text = self._value(f"{self.name}/value/{key}")
        return int(text) if text else None


def is_grouped() -> bool:
    """Return True if a process group exists."""
    return dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """Return this process's rank, which is also valid before a process group exists."""
    if is_grouped():
        return dist.get_rank()
    return read_integer("RANK", 0)


class TagWriter:
    """Writer of one line of checkpoints for the ranks of training that save together."""

    def __init__(self, settings: Settings, memory_bytes: int, plan: TagPlan, ranks: StoreRanks) -> None:
        self.members = plan.members
        self._save: Save | None = None  # the newest
        folder = local_folder(settings, claim_run(open_store(settings.home)))
        for local in dict.fromkeys((folder, None)):
            every = None if local is None else settings.interval_s
            self.local = local
            try:
                self.checkpointer = Checkpointer(
                    Home(settings.home, every=None if every is None else datetime.timedelta(seconds=every)),
                    keep=None,
                    local=None if local is None else Local(local, keep=settings.keep_local),
                    memory=memory_bytes,
                    group=ranks,
                    quiet=True,
                    watches=[NO_NOTICES],
                    limits=Limits(rank_timeout=RANKS_S),
                )
                self.begin(plan)
                break
            except Unsupported as error:
                if local is None:
                    raise
                warn(
                    f"Checkpoints are saved directly to {settings.home}, without a nearer copy: {error}",
                    SaveWarning,
                )

    def begin(self, plan: TagPlan) -> None:
        """Begin an attempt that continues the base of a plan; collective over the ranks of the writer."""
        self.checkpointer.continue_from(plan.base)
        self.last = plan.base  # step that was saved last

    def write(self, plan: TagPlan, state: dict[str, Any]) -> Save:
        """Save a state under a step. Its objects may change when this returns."""
        marked = {key: per_rank(value) for key, value in state.items()}
        save = self._save = self.checkpointer.save(plan.step, marked, to_home=plan.to_home)
        self.last = plan.step
        with contextlib.suppress(HoldfastError):  # the next call raises it, like every failed save
            save.wait_staged()
        return save

    def wait_complete(self) -> None:
        """Wait until the newest save is complete in the nearest tier, or has failed."""
        save = self._save
        if save is not None and save.step == self.last and not save.skipped:
            with contextlib.suppress(HoldfastError):  # the next save raises it
                save.wait_durable(RANKS_S)
