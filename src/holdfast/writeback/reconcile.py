"""Brings directory, journal and bucket together at a mount, so that the newest of each file stays."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from holdfast.quantity import plural
from holdfast.store import Entry, Store
from holdfast.writeback.book import Book
from holdfast.writeback.capture import Captures
from holdfast.writeback.claim import check_not_overtaken, newest_attempt
from holdfast.writeback.fetch import Fetch
from holdfast.writeback.files import Fingerprint, Found, look
from holdfast.writeback.journal import FOLDER
from holdfast.writeback.log import say
from holdfast.writeback.order import Deed, Deeds, Order
from holdfast.writeback.terms import Terms

ASIDE = "set-aside"
"""Folder beside the journal for files that gave way to newer ones of the bucket; nothing removes them."""


def reconcile(store: Store, root: Path, terms: Terms, book: Book, captures: Captures) -> None:
    """Have in the directory what the bucket holds, and keep what it does not hold yet.

    If no newer attempt of the owner has mounted the place since this directory was mounted last, the
    directory is ahead of the bucket: what has not been sent stays and is sent. If one has, it is behind, and
    the bucket's files win. A file that was never sent from here and whose name the bucket has gives way too.
    What gives way is moved to `ASIDE`, not deleted.

    Raises:
        RetryLater: the bucket failed, or the disk is full; the next mount goes on from there.
        Conflict: a newer attempt has mounted the place already.
    """
    check_not_overtaken(store, terms.owner, terms.attempt)
    is_behind = _is_behind(store, terms, book)
    fetch = Fetch(store, root)
    objects = {entry.name: entry for entry in fetch.listed(terms.skips)}
    found, _ = look(root, terms.skips)
    aside = _giving_way(book.order, found, objects, is_behind=is_behind)
    if is_behind:
        numbers = list(book.order.entries)
        book.do(_without_past)
        for number in numbers:
            captures.drop(number)
    _set_aside(root, aside)
    if terms.fetch:
        _fetch(fetch, book, objects, [one for one in found if one.name not in aside], is_behind=is_behind)
    book.journal.state(owner=terms.owner, attempt=str(terms.attempt))


def _is_behind(store: Store, terms: Terms, book: Book) -> bool:
    """Whether an attempt has mounted the place after the one that this directory was mounted for."""
    if not terms.owner or book.journal.fact("owner") != terms.owner:
        return False
    return newest_attempt(store, terms.owner) > int(book.journal.fact("attempt", "0"))


def _fetch(
    fetch: Fetch, book: Book, objects: dict[str, Entry], found: list[Found], *, is_behind: bool
) -> None:
    present = {one.name: one for one in found}
    wanted, replaced = _wanted(book.order, objects, present, fetch, is_behind=is_behind)
    fetch.check_room(wanted)
    for one in fetch.bring(wanted, replaced):
        book.do(lambda order, one=one: order.fetched(one.name, one.sent))


def _giving_way(
    order: Order, found: list[Found], objects: Collection[str], *, is_behind: bool
) -> dict[str, Fingerprint]:
    """Files that the bucket's take the place of."""
    aside = {}
    for one in found:
        sent = order.sent.get(one.name)
        is_sent = sent is not None and sent.fingerprint.matches(one.fingerprint)
        is_unknown = sent is None and not order.has_pending(one.name) and one.name not in order.problems
        if (is_behind and not is_sent) or (is_unknown and one.name in objects):
            aside[one.name] = one.fingerprint
    return aside


def _without_past(order: Order) -> Deeds:
    """Forget what was to be done: another mount has gone on without it."""
    deeds = [Deed("entry", number, None) for number in order.entries]
    deeds += [Deed("problem", name, None) for name in order.problems]
    deeds += [Deed("sent", name, None) for name in order.sent]
    order.forget()
    return deeds


def _wanted(
    order: Order, objects: dict[str, Entry], present: dict[str, Found], fetch: Fetch, *, is_behind: bool
) -> tuple[list[Entry], dict[str, Fingerprint]]:
    """The objects to fetch, and the files that they replace."""
    wanted, replaced = [], {}
    for name, entry in objects.items():
        sent, one = order.sent.get(name), present.get(name)
        if order.has_pending(name):
            continue
        if one is None:
            if sent is None:  # else it was deleted here, while nobody watched
                wanted.append(entry)
        elif is_behind or (
            sent is not None and sent.fingerprint.matches(one.fingerprint) and not fetch.is_same(entry, sent)
        ):
            wanted.append(entry)
            replaced[name] = one.fingerprint
    return wanted, replaced


def _set_aside(root: Path, names: Collection[str]) -> None:
    if not names:
        return
    folder = root / FOLDER / ASIDE / time.strftime("%Y%m%d-%H%M%S")
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            (root / name).rename(target)
    say(f"{plural(len(names), 'file')} of {root} gave way to newer ones of the bucket; they are in {folder}")
