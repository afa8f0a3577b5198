"""The compile cache of one training: brought from home before the first compile, sent there after saves."""

from __future__ import annotations

import os
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable
from typing import final

from holdfast.compiled import directory as directories
from holdfast.compiled.facts import facts_of_machine, key_of
from holdfast.compiled.loading import Loaded, load, read_indices
from holdfast.compiled.sending import Sender, Sent
from holdfast.compiled.trust import VARIABLE, is_trusted
from holdfast.errors import HoldfastError
from holdfast.quantity import say_bytes, say_seconds
from holdfast.store import Store

LOAD_LIMIT_S = 120.0
"""A start waits no longer for compiled code; what has not come by then is compiled anew."""
CLOSE_LIMIT_S = 10.0
"""The end of a training waits no longer for what is still to be sent."""

_COMPILER = "torch._inductor.codecache"
_MAX_TOLD = 3


@final
class CompileCache:
    """The compile cache of one rank's process.

    Nothing of it raises once it is made: compiled code can always be compiled anew, so training goes on, and
    `problems` has words for what did not work.

    Args:
        store: the home.
        home: its path or URL.
        limit_bytes: what all compile caches of the home may take together.
        trust_home: whether code of this home may be run; None for what the environment and the user's file
            say.
        told: hears what was sent, from a thread.

    Raises:
        InvalidInput: the environment or the user's file name homes in a way that cannot be used.
    """

    def __init__(
        self,
        store: Store,
        home: str,
        *,
        limit_bytes: int,
        trust_home: bool | None = None,
        told: Callable[[Sent, float], None] = lambda sent, seconds: None,
    ) -> None:
        self._store = store
        self._home = home
        self._limit_bytes = limit_bytes
        self._asks_for_trust = trust_home is None
        self._told = told
        self.is_trusted = is_trusted(home) if trust_home is None else trust_home
        self.problems: list[str] = []
        """What did not work since somebody last looked and took it away."""
        self._loaded: Loaded | None = None
        self._has_failed = False  # told once, however often sending is tried
        self._sender: Sender | None = None
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ended = threading.Event()
        if self.is_trusted:
            self._point()

    def _point(self) -> None:
        """Have torch.compile use a directory of this run, unless the user has chosen one."""
        found = directories.current() if directories.is_chosen() else None
        if found is not None and not directories.is_own(found.path):
            return
        try:
            os.environ[directories.VARIABLE] = str(directories.own(self._home, key_of(facts_of_machine())))
        except OSError as error:
            self.problems.append(
                f"No directory for compiled code could be made: {error}. Compiled code is not kept in "
                f"{self._home}; training is not affected."
            )
            self.is_trusted = False

    @property
    def place(self) -> str:
        """The directory, for finding the ranks that share it; a word where torch has not yet chosen one."""
        found = directories.current() if directories.is_chosen() else None
        return str(found.path) if found else "chosen by torch"

    # -- from home -------------------------------------------------------------------------------------------

    def load(self) -> tuple[Loaded, str | None]:
        """Bring what home has into the directory, if home is trusted; the first time only.

        Returns:
            What was brought, and a line for people, if there is something to say.

        Blocks: for some reads, at most about two minutes.
        """
        if self._loaded is not None:
            return Loaded(), None
        self._loaded = Loaded()
        facts = facts_of_machine()
        key = key_of(facts)
        try:
            if not self.is_trusted:
                return Loaded(), self._look(key)
            found = directories.current()
            assert found is not None
            began = time.monotonic()
            loaded = load(self._store, key, facts, found, limit_s=LOAD_LIMIT_S)
        except HoldfastError as error:
            self.problems.append(
                f"The compile cache in {self._home} could not be read: {error} It is compiled anew."
            )
            return Loaded(), None
        self._loaded = loaded
        self._tell_of(loaded.problems)
        if not loaded.num_placed:
            return loaded, None
        spent = say_seconds(time.monotonic() - began)
        return loaded, (
            f"compiled code from {self._home}: {loaded.num_placed} files, {say_bytes(loaded.num_bytes)} in "
            f"{spent}, verified"
        )

    def _look(self, key: str) -> str | None:
        """What to say of an untrusted home."""
        indices, _ = read_indices(self._store, key, facts_of_machine())
        if not indices or not self._asks_for_trust:
            return None
        return (
            f"{self._home} holds compiled code for this machine. It is not loaded, for it is code: if you "
            f"trust whoever can write there, say `holdfast trust {shlex.quote(self._home)}`, {VARIABLE}=... "
            "or trust_home=True"
        )

    def _tell_of(self, problems: list[str]) -> None:
        if problems:
            more = f" (and {len(problems) - _MAX_TOLD} more)" if len(problems) > _MAX_TOLD else ""
            self.problems.append(
                f"Some of the compile cache in {self._home} was not used, and is compiled anew: "
                f"{' '.join(problems[:_MAX_TOLD])}{more}"
            )

    # -- to home ---------------------------------------------------------------------------------------------

    def begin(self, *, attempt: int, rank: int, turn: int) -> None:
        """Let this rank send, as one of an attempt; one rank of those that share a directory does.

        Args:
            attempt: this start's number.
            rank: of this process.
            turn: how many others send before this one.
        """
        facts = facts_of_machine()
        loaded = self._loaded or Loaded()
        self._sender = Sender(
            self._store,
            key_of(facts),
            facts,
            attempt=attempt,
            rank=rank,
            limit_bytes=self._limit_bytes,
            turn=turn,
            known=loaded.there,
            lacking=loaded.lacking,
        )

    def send_soon(self) -> None:
        """Have a thread send what is new, if anything was compiled in this process."""
        if self._sender is None or self._is_ended.is_set() or _COMPILER not in sys.modules:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="holdfast-compiled", daemon=True)
            self._thread.start()
        if self._orders.empty():
            self._orders.put("send")

    def close(self, timeout_s: float = CLOSE_LIMIT_S) -> None:
        """Send what is left, and end.

        Blocks: at most `timeout_s`; what has not been sent by then is not.
        """
        if timeout_s > 0:
            self.send_soon()
        if self._thread is not None and timeout_s > 0:
            self._orders.put("last")
            self._thread.join(timeout_s)
        self._is_ended.set()
        self._orders.put("last")

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            if not self._is_ended.is_set():
                self._send(is_last=order == "last")
            if order == "last":
                return

    def _send(self, *, is_last: bool) -> None:
        found, sender = directories.current(), self._sender
        if found is None or sender is None:
            return
        began = time.monotonic()
        try:
            sent = sender.send(found, is_last=is_last, is_ended=self._is_ended.is_set)
        except (HoldfastError, OSError) as error:
            message = (
                f"Compiled code could not be sent to {self._home}: {error} It is tried again after later "
                "saves. Training and checkpoints are not affected."
            )
            sent = Sent(problem=message)
        if sent.problem and not self._has_failed:
            self._has_failed = True
            self.problems.append(sent.problem)
        if sent.num_files:
            self._told(sent, time.monotonic() - began)
