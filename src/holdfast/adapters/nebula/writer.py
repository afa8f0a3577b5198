"""Hands complete tags over to a Checkpointer, which is made for the ranks that save together."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.adapters.nebula.board import Plan
from holdfast.adapters.nebula.circle import Circle
from holdfast.adapters.nebula.settings import Settings
from holdfast.callsite import warn
from holdfast.checkpointer import Checkpointer
from holdfast.errors import HoldfastError, SaveWarning, Unsupported
from holdfast.format.hashes import digest
from holdfast.home.claim import claim_run
from holdfast.home.documents import read_run
from holdfast.keeper import Save
from holdfast.privacy import is_own
from holdfast.state.spread import per_rank
from holdfast.store import open_store

_RUN = re.compile(r"[0-9A-Za-z_-]{1,64}")
_KEPT_SAVES = 16
RANKS_S = 600.0
"""How long a rank waits for the others when they begin to save together."""


class Writer:
    """One line of checkpoints of one group of ranks.

    Args:
        settings: where to.
        local: folder of the nearer tier; None for none.
        memory_bytes: cap of this process.
        members: the ranks of training that save.
    """

    def __init__(
        self, settings: Settings, local: str | None, memory_bytes: int, members: Sequence[int]
    ) -> None:
        self.members = tuple(members)
        self.local = local
        self.last: int | None = None  # step saved last on this line
        self.saves: dict[int, Save] = {}
        self._settings = settings
        self._memory_bytes = memory_bytes
        self._state: dict[str, Any] = {}
        self._checkpointer: Checkpointer | None = None

    def begin(self, plan: Plan, circle: Circle) -> None:
        """Begin an attempt that goes on from the base of a plan.

        Raises:
            HoldfastError: the home cannot be taken over, or a rank did not come.

        Ranks: collective over the circle.
        """
        if self._checkpointer is None:
            try:
                self._open(plan, circle)
            except Unsupported as error:
                if self.local is None:
                    raise
                message = f"Checkpoints go straight to {self._settings.home}, without a nearer copy: {error}"
                warn(message, SaveWarning)
                self.local = None
                self._open(plan, circle)
        else:
            self._checkpointer.restore(plan.base, only=())
        self.last = plan.base

    def _open(self, plan: Plan, circle: Circle) -> None:
        interval_s = self._settings.interval_s if self.local is not None else None
        made = Checkpointer(
            self._settings.home,
            self._state,
            keep=None,
            local=self.local,
            keep_local=self._settings.keep_local,
            home_every=None if interval_s is None else datetime.timedelta(seconds=interval_s),
            memory=self._memory_bytes,
            signals=False,
            ranks_timeout=RANKS_S,
            group=circle,
            quiet=True,
        )
        made.restore(plan.base, only=())  # changes nothing here; what follows goes on from there
        self._checkpointer = made

    def write(self, plan: Plan, state: dict[str, Any]) -> Save:
        """Save a state under a step.

        Returns when it is staged: whatever it was made of may be changed then.

        Raises:
            HoldfastError: see `Checkpointer.save`.
        """
        assert self._checkpointer is not None
        self._state.update({key: per_rank(value) for key, value in state.items()})
        try:
            save = self._checkpointer.save(plan.step, to_home=plan.to_home)
            self.last = plan.step
            self.saves[plan.step] = save
            with contextlib.suppress(HoldfastError):  # told by the next call, as every failure of a save
                save.wait_staged()
        finally:
            self._state.clear()
            self._checkpointer.forget()
        for step in sorted(self.saves)[:-_KEPT_SAVES]:
            del self.saves[step]
        return save

    def wait_complete(self) -> None:
        """Wait until the newest save is complete in the nearest tier, or has failed."""
        save = self.saves.get(self.last if self.last is not None else -1)
        if save is not None and not save.skipped:
            with contextlib.suppress(HoldfastError):  # told by the next save
                save.wait_durable(RANKS_S)

    def send_home(self, step: int) -> None:
        """See `Checkpointer.send_home`."""
        if self._checkpointer is not None:
            self._checkpointer.send_home(step)

    def wait_home(self, timeout_s: float | None = None) -> None:
        """Wait until the newest save is in home.

        Raises:
            HoldfastError: it failed.
            RetryLater: not within `timeout_s`.
        """
        if self._checkpointer is not None:
            self._checkpointer.wait(timeout_s)

    def close(self) -> None:
        """Wait until the newest save is in home, and let the keeper end.

        Raises:
            HoldfastError: it failed.
        """
        if self._checkpointer is not None:
            self._checkpointer.close()


def local_folder(settings: Settings, run: str | None) -> str | None:
    """The folder of the nearer tier, made if it is in a folder of the host; None if there is none.

    Args:
        settings: what was asked for.
        run: id of the run; None if there is none yet, and so no folder of it.
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
    message = (
        f"{root} cannot be this user's folder for nearer copies, so checkpoints go straight to "
        f"{settings.home}. "
        "Set HOLDFAST_LOCAL to a folder on this host's fast disk."
    )
    warn(message, SaveWarning)
    return None


def run_of(home: str, *, make: bool) -> str | None:
    """Id of the run that a home holds, made if asked for; None if there is none."""
    store = open_store(home)
    if make:
        return claim_run(store)
    found = read_run(store)
    return found.id if found else None
