"""Writer that saves complete tags with a Checkpointer for the ranks that save together."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.adapters.kit.run import NO_NOTICES
from holdfast.adapters.nebula.settings import Settings
from holdfast.adapters.nebula.tag_coordinator import StoreRanks, TagPlan
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.home.claim import claim_run
from holdfast.checkpoint.home.documents import read_run
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.run import Checkpointer
from holdfast.checkpoint.run.options import Home, Limits, Local
from holdfast.checkpoint.state.entry import per_rank
from holdfast.checkpoint.store import open_store
from holdfast.errors import HoldfastError, SaveWarning, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.privacy import is_own

_RUN = re.compile(r"[0-9A-Za-z_-]{1,64}")
_KEPT_SAVES = 16
RANKS_S = 600.0
"""Limit of the wait for other ranks that begin to save together."""


class TagWriter:
    """Writer of one line of checkpoints for a group of ranks.

    Args:
        local: folder of the nearer tier, or None.
        members: ranks of training that save.
    """

    def __init__(
        self, settings: Settings, local: str | None, memory_bytes: int, members: Sequence[int]
    ) -> None:
        self.members = tuple(members)
        self.local = local
        self.last: int | None = None  # step that was saved last
        self.saves: dict[int, Save] = {}
        self._settings = settings
        self._memory_bytes = memory_bytes
        self._checkpointer: Checkpointer | None = None

    def begin(self, plan: TagPlan, ranks: StoreRanks) -> None:
        """Begin an attempt that continues the base of a plan.

        Ranks: collective over `ranks`.
        """
        if self._checkpointer is None:
            try:
                self._open(plan, ranks)
            except Unsupported as error:
                if self.local is None:
                    raise
                warn(
                    f"Checkpoints are saved directly to {self._settings.home}, without a nearer copy: "
                    f"{error}",
                    SaveWarning,
                )
                self.local = None
                self._open(plan, ranks)
        else:
            self._checkpointer.continue_from(plan.base)
        self.last = plan.base

    def _open(self, plan: TagPlan, ranks: StoreRanks) -> None:
        interval_s = self._settings.interval_s if self.local is not None else None
        made = Checkpointer(
            Home(
                self._settings.home,
                every=None if interval_s is None else datetime.timedelta(seconds=interval_s),
            ),
            keep=None,
            local=None if self.local is None else Local(self.local, keep=self._settings.keep_local),
            memory=self._memory_bytes,
            group=ranks,
            quiet=True,
            watches=[NO_NOTICES],
            limits=Limits(rank_timeout=RANKS_S),
        )
        made.continue_from(plan.base)
        self._checkpointer = made

    def write(self, plan: TagPlan, state: dict[str, Any]) -> Save:
        """Save a state under a step.

        Returns when the state is staged. You may change its objects then.
        """
        assert self._checkpointer is not None
        marked = {key: per_rank(value) for key, value in state.items()}
        save = self._checkpointer.save(plan.step, marked, to_home=plan.to_home)
        self.last = plan.step
        self.saves[plan.step] = save
        with contextlib.suppress(HoldfastError):  # the next call raises it, like every failed save
            save.wait_staged()
        for step in sorted(self.saves)[:-_KEPT_SAVES]:
            del self.saves[step]
        return save

    def wait_complete(self) -> None:
        """Wait until the newest save is complete in the nearest tier, or has failed."""
        save = self.saves.get(self.last if self.last is not None else -1)
        if save is not None and not save.skipped:
            with contextlib.suppress(HoldfastError):  # the next save raises it
                save.wait_durable(RANKS_S)

    def send_home(self, step: int) -> None:
        """Copy a checkpoint to home although it is not due."""
        if self._checkpointer is not None:
            self._checkpointer.send_home(step)

    def wait_home(self, timeout_s: float | None = None) -> None:
        """Wait until the newest save is in home."""
        if self._checkpointer is not None:
            self._checkpointer.wait(timeout_s)

    def close(self) -> None:
        """Wait until the newest save is in home, and end the keeper."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def local_folder(settings: Settings, run: str | None) -> str | None:
    """Return the folder of the nearer tier, or None. A folder in the host's folder for all runs is created.

    Args:
        settings: settings of the session.
        run: id of the run, or None if it does not exist yet.
    """
    if settings.local is not None:
        return settings.local
    if settings.interval_s is None or settings.local_root is None or run is None:
        return None
    root = Path(settings.local_root).expanduser()
    with contextlib.suppress(OSError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.is_symlink() and root.lstat().st_uid == os.geteuid():
            root = root.resolve()
        if is_own(root) and not root.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return str(root.resolve() / (run if _RUN.fullmatch(run) else digest(run.encode())))
    warn(
        f"{root} cannot be used as this user's folder for nearer copies, so checkpoints are saved "
        f"directly to {settings.home}. Set HOLDFAST_LOCAL to a folder on a fast disk of this host.",
        SaveWarning,
    )
    return None


def run_of(home: str, *, make: bool) -> str | None:
    """Return the id of a home's run, or None. With `make`, create a missing one."""
    store = open_store(home)
    if make:
        return claim_run(store)
    found = read_run(store)
    return found.id if found else None
