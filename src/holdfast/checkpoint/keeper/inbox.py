"""Inbox of a keeper: a queue of the trainer's messages, filled by a thread while saves are persisted."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Protocol, TypeAlias

from msgspec import Struct

from holdfast.checkpoint.keeper import messages, packets
from holdfast.system.failpoint import failpoint


class StagedSave(Struct, frozen=True):
    """Save in an arena, to be persisted. Its descriptors are closed by the worker."""

    request: messages.SubmitSave
    arena_fd: int
    draft_fd: int
    received_s: float


Received: TypeAlias = StagedSave | messages.PlainMessage


class SaveCopier(Protocol):
    """Mirror of a keeper, as its inbox sees it."""

    def add(self, save: StagedSave) -> None:
        """Copy a save to the peers."""
        ...

    def keep(self, steps: Collection[int]) -> None:
        """Keep the copies of these steps only."""
        ...


class TrainerInbox:
    """Queue of a trainer's messages, and the way to reply to it."""

    def __init__(self, end: socket.socket, trainer_pid: int) -> None:
        self.trainer_gone = False  # it has exited, or sent its last message
        self.has_closed = False  # it has sent its last message
        self.frees_memory = False  # no later attempt needs the contents of this keeper's memory
        self.text_shown = threading.Event()  # the trainer has printed a text that it was to reply to
        self._mirror: SaveCopier | None = None
        self._end = end
        self._trainer_pid = trainer_pid
        self._saves: deque[StagedSave] = deque()  # thousands, if the store is slow
        self._others: deque[Received] = deque()
        self._delay = ""  # reason for which all saves wait
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the thread that receives messages."""
        threading.Thread(target=self._run, name="holdfast-inbox", daemon=True).start()

    def reply(self, message: messages.KeeperMessage) -> None:
        """Send a message to the trainer, unless it has exited."""
        with contextlib.suppress(OSError):
            packets.send(self._end, message)

    def set_delay(self, reason: str) -> None:
        """Report to the trainer why its saves wait, also those that arrive later; "" ends the wait.

        The first reason of a wait is reported.
        """
        with self._changed:
            if reason and self._delay:
                return
            self._delay = reason
            waiting = [save.request.step for save in self._saves] if reason else []
        for step in waiting:
            self.report_delay(step, reason)

    def report_delay(self, step: int, reason: str) -> None:
        """Send the reason of a save that waits."""
        self.reply(messages.SaveDelayed(step, reason[: messages.MAX_DETAIL]))

    def copy_to(self, mirror: SaveCopier) -> None:
        """Have a mirror copy each save for peers at once, while it waits in the queue."""
        with self._changed:
            self._mirror = mirror
            for save in self._saves:
                if save.request.to_peers:
                    mirror.add(save)

    # -- for the worker --------------------------------------------------------------------------------------
    @property
    def saves(self) -> list[StagedSave]:
        """Saves in the queue, oldest first."""
        with self._changed:
            return list(self._saves)

    @property
    def has_saves(self) -> bool:
        """True if a save is in the queue."""
        return bool(self._saves)

    def wait_gone(self) -> None:
        """Wait for the trainer's end, or its last message."""
        with self._changed:
            self._changed.wait_for(lambda: self.trainer_gone)

    def receive(self, timeout_s: float | None, *, has_work: bool) -> list[Received] | None:
        """Remove and return all messages but saves, followed by the oldest save.

        Return None if the trainer has exited and the queue is empty.

        Args:
            has_work: also wait after the trainer has exited, as the worker is not done.

        Blocks: until a message arrives or the trainer exits, at most `timeout_s`.
        """
        with self._changed:
            if not (self._saves or self._others) and (has_work or not self.trainer_gone):
                self._changed.wait(timeout_s)
            if not (self._saves or self._others):
                return None if self.trainer_gone else []
            others = list(self._others)
            self._others.clear()
            return [*others, self._saves.popleft()] if self._saves else others

    def put(self, item: Received) -> None:
        """Add an item from another thread of the keeper."""
        with self._changed:
            if isinstance(item, StagedSave):
                self._saves.append(item)
            else:
                self._others.append(item)
            self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._receive_all()
        finally:  # even after a bug: the trainer then starts another keeper, and sends everything again
            with self._changed:
                self.trainer_gone = True
                self._changed.notify_all()

    def _receive_all(self) -> None:
        """Receive messages until the trainer has exited, and everything that it sent has been received."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            # Data loader workers of a killed trainer may keep its end of the socket open, so the process is
            # watched too.
            with contextlib.suppress(ProcessLookupError):
                selector.register(os.pidfd_open(self._trainer_pid), selectors.EVENT_READ)
            has_exited = len(selector.get_map()) == 1
            while self._receive_next(selector, timeout_s=0 if has_exited else None):
                pass

    def _receive_next(self, selector: selectors.BaseSelector, *, timeout_s: float | None) -> bool:
        ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        if self._end not in ready:
            return False  # the process has exited, and all of its messages have been received
        message, fds = packets.receive(self._end)
        if message is None:
            return False
        if isinstance(message, messages.Ping):
            self.reply(messages.Pong())
        elif isinstance(message, messages.TextShown):
            self.text_shown.set()
        elif isinstance(message, messages.KeepCopies):
            if self._mirror is not None:
                self._mirror.keep(message.steps)
        else:
            with self._changed:
                self._add(message, fds)
                self._changed.notify_all()
                delay = self._delay
            if delay and isinstance(message, messages.SubmitSave):
                self.report_delay(message.step, delay)
        return True

    def _add(self, message: messages.Message, fds: list[int]) -> None:
        if isinstance(message, messages.Close):  # pings may still follow
            self.frees_memory = message.frees_memory
            self.has_closed = self.trainer_gone = True
        elif isinstance(message, messages.SubmitSave):
            arena_fd, draft_fd = fds
            failpoint("keeper.received")
            save = StagedSave(message, arena_fd, draft_fd, time.monotonic())
            if message.to_peers and self._mirror is not None:
                self._mirror.add(save)  # first: the worker closes the descriptors
            self._saves.append(save)
        elif isinstance(message, messages.PlainMessage):
            self._others.append(message)
