"""Homes that a command is given: opened, listed, and checked to exist."""

from __future__ import annotations

import re
import sys

from holdfast.errors import Corrupt, InvalidInput, NotFound, Unsupported
from holdfast.format import names
from holdfast.home.documents import read_run, read_run_document
from holdfast.home.listing import Listing, list_home
from holdfast.store import Store, open_store
from holdfast.store.nearest import Nearest


def open_home(place: str) -> tuple[Store, Listing]:
    """The store and the listing of a home that exists.

    Raises:
        NotFound: there is no home.
        InvalidInput: no place that can be.
        Unsupported: a kind of place that this version does not read.
        RetryLater: the store failed.
    """
    store = open_store(place)
    home = list_home(store)
    if not home.saved and not home.attempts and store.size(names.RUN) is None:
        found = re.fullmatch(r"(.*?)/*(step-\d{8,})/?", place)
        hint = f"HOME is the folder above it: {found[1] or '.'}." if found else "Check the path."
        message = f"{place} holds no run: there is no {names.RUN} and no checkpoint in it. {hint}"
        raise NotFound(message)
    return store, home


def read_run_id(store: Store) -> str | None:
    """Id of the run that a home holds; a damaged `holdfast.json` is told on stderr and passed over."""
    try:
        read_run_document(store)
    except Corrupt as error:
        print(f"holdfast: {error} Going on with what the rest of the home says.", file=sys.stderr)
    try:
        found = read_run(store)
    except (Corrupt, Unsupported) as error:
        print(f"holdfast: {error} Going on without it.", file=sys.stderr)
        return None
    return found.id if found else None


def open_tiers(place: str, local: str) -> tuple[Store, Listing, dict[str, Listing]]:
    """A home and a host's local folder as one store, with its listing and those of both.

    Raises:
        NotFound: there is no home, or nothing of a run in the folder.
        InvalidInput: the folder holds another run.
        RetryLater: a store failed.
    """
    home, in_home = open_home(place)
    near, in_near = open_home(local)
    runs = read_run(home), read_run(near)
    if None not in runs and len({run.id for run in runs if run}) > 1:
        message = f"{local} holds another run than {place}: it is not a local folder of it."
        raise InvalidInput(message)
    store = Nearest([near, home])
    return store, list_home(store), {"local": in_near, "home": in_home}
