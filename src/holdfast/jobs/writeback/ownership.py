"""Attempts of an owner that have mounted a place: newer ones stop the uploaders of older ones."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time

from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, InvalidInput

FOLDER = ".holdfast-writeback"
"""Prefix of the names of Holdfast's own objects in the place."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def check_owner(owner: str, attempt: int) -> None:
    """Check that an owner and its attempt can be recorded."""
    if owner and not _OWNER.fullmatch(owner):
        raise InvalidInput(f"owner may only contain letters, digits, '.', '_' and '-', got {owner!r}.")
    if bool(owner) != (attempt > 0):
        raise InvalidInput(f"Give both owner and attempt (from 1), or neither; got {owner!r} and {attempt}.")


def newest_attempt(store: Store, owner: str) -> int:
    """Return the owner's newest attempt that has mounted the place, or 0."""
    found = [
        re.fullmatch(r".*/attempt-(\d+)\.json", entry.name) for entry in store.list(f"{FOLDER}/{owner}/")
    ]
    return max((int(one[1]) for one in found if one), default=0)


def record_attempt(store: Store, owner: str, attempt: int) -> None:
    """Record that an attempt has mounted the place. Each of its nodes may do so."""
    facts = {"owner": owner, "attempt": attempt, "host": socket.gethostname(), "pid": os.getpid()}
    text = json.dumps({**facts, "unix_s": time.time()}).encode()
    with contextlib.suppress(Conflict):
        store.put(f"{FOLDER}/{owner}/attempt-{attempt:06}.json", text, if_absent=True)


def check_newest_attempt(store: Store, owner: str, attempt: int) -> None:
    """Raise if a newer attempt of the owner has mounted the place."""
    newest = newest_attempt(store, owner) if owner else 0
    if newest > attempt:
        raise Conflict(
            f"{store.url} was mounted by attempt {newest} of {owner}. This is attempt {attempt}, which stops "
            "uploading so that it does not overwrite newer files."
        )
