"""Homes named on the command line: opened, listed, and checked to exist."""

from __future__ import annotations

import contextlib
import difflib
import re
from pathlib import Path

from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.claim import read_run, read_run_document
from holdfast.checkpoint.home.listing import Listing, list_home
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.tiered import TieredStore
from holdfast.cli import print_note
from holdfast.errors import Corrupt, InvalidInput, NotFound, Unsupported


def open_home(place: str) -> tuple[Store, Listing]:
    """Open a home that exists, and list it."""
    store = open_store(place)
    home = list_home(store)
    if not home.saved and not home.attempts and store.size(names.RUN) is None:
        found = re.fullmatch(r"(.*?)/*(step-\d{8,})/?", place)
        hint = f"HOME is the folder above it: {found[1] or '.'}." if found else nearest_hint(place)
        raise NotFound(f"{place} does not contain a run: it has neither {names.RUN} nor a checkpoint. {hint}")
    return store, home


def nearest_hint(place: str) -> str:
    """Return a hint about a path that does not exist: the most similar name beside it, if any."""
    path = Path(place).expanduser()
    others: list[str] = []
    with contextlib.suppress(OSError):
        if "://" not in place and not path.exists():
            others = [one.name for one in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, others, n=1)
    return f"Did you mean {path.with_name(near[0])}?" if near else "Check the path."


def read_run_id(store: Store) -> str | None:
    """Return the id of the run in a home. A damaged `holdfast.json` is reported on stderr and ignored."""
    try:
        read_run_document(store)
    except Corrupt as error:
        print_note(f"{error} Continuing with the rest of the home.")
    try:
        found = read_run(store)
    except (Corrupt, Unsupported) as error:
        print_note(f"{error} Continuing without it.")
        return None
    return found.id if found else None


def open_tiers(place: str, local: str | None) -> tuple[Store, Listing, dict[str, Listing] | None]:
    """Open a home and, if given, a local folder as one store. Return it, its listing and those of both."""
    home, in_home = open_home(place)
    if local is None:
        return home, in_home, None
    near, in_near = open_home(local)
    runs = read_run(home), read_run(near)
    if None not in runs and len({run.id for run in runs if run}) > 1:
        raise InvalidInput(f"{local} holds another run than {place}, so it is not its local folder.")
    store = TieredStore([near, home])
    return store, list_home(store), {"local": in_near, "home": in_home}
