"""Which attempt of a job mounted a place last: tells a directory that is behind, and stops old uploaders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time

from holdfast.errors import Conflict, InvalidInput
from holdfast.store import Store

FOLDER = ".holdfast-writeback"
"""Begins the names of our own objects in the place."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def check_owner(owner: str, attempt: int) -> None:
    """Refuse what no claim can bear.

    Raises:
        InvalidInput: an owner that is no plain word, or an attempt below 1; without owner there is none.
    """
    if owner and not _OWNER.fullmatch(owner):
        raise InvalidInput(f"owner must be a word of letters, digits, '.', '_' and '-', got {owner!r}.")
    if bool(owner) != (attempt > 0):
        raise InvalidInput(f"owner and attempt (from 1) belong together, got {owner!r} and {attempt}.")


def newest_attempt(store: Store, owner: str) -> int:
    """The greatest attempt of the owner that has mounted the place; 0 if none has.

    Raises:
        RetryLater: the store failed.
    """
    found = [
        re.fullmatch(r".*/attempt-(\d+)\.json", entry.name) for entry in store.list(f"{FOLDER}/{owner}/")
    ]
    return max((int(one[1]) for one in found if one), default=0)


def claim(store: Store, owner: str, attempt: int) -> None:
    """Leave word that an attempt has mounted the place; others of the same attempt may have already.

    Raises:
        RetryLater: the store failed.
    """
    facts = {"owner": owner, "attempt": attempt, "host": socket.gethostname(), "pid": os.getpid()}
    text = json.dumps({**facts, "unix_s": time.time()}).encode()
    with contextlib.suppress(Conflict):
        store.put(f"{FOLDER}/{owner}/attempt-{attempt:06}.json", text, if_absent=True)


def check_not_overtaken(store: Store, owner: str, attempt: int) -> None:
    """Refuse to go on for an attempt after which a newer one has mounted the place.

    Raises:
        Conflict: one has.
        RetryLater: the store failed.
    """
    newest = newest_attempt(store, owner) if owner else 0
    if newest > attempt:
        raise Conflict(
            f"{store.url} was mounted by attempt {newest} of {owner}, and this is attempt {attempt}. It "
            "sends no more, so that it does not overwrite what is newer."
        )
