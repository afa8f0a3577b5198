"""The order and its journal together: what changes one changes the other, under one lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.errors import RetryLater
from holdfast.writeback.journal import Journal
from holdfast.writeback.log import say
from holdfast.writeback.order import Deeds, Entry, Order

_PAUSE_S = 1.0


class Book:
    """What the threads of an uploader share.

    Args:
        journal: of the directory; its order is loaded.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.order: Order = journal.load()
        self.changed = threading.Condition(threading.RLock())
        self._trouble = journal.fact("trouble")

    def do(self, transition: Callable[[Order], Deeds]) -> None:
        """Change the order, and make that survive a kill.

        Blocks: while the disk of the journal takes nothing; what changed is known to this process only then.
        """
        with self.changed:
            deeds = transition(self.order)
            while deeds:
                try:
                    self.journal.write(deeds)
                    break
                except RetryLater as error:
                    say(f"{error} Trying again.")
                    time.sleep(_PAUSE_S)
            self.changed.notify_all()

    def begin_first(self, timeout_s: float) -> Entry | None:
        """The entry that is to be done now; it is marked as begun.

        Blocks: until there is one, at most `timeout_s`.
        """
        with self.changed:
            if not self.order.entries:
                self.changed.wait(timeout_s)
            entry = self.order.first()
            if entry is not None:
                self.order.begin(entry)
            return entry

    def tell(self, trouble: str) -> None:
        """Say what keeps the first entry from being done, for who looks at the directory; "" for nothing."""
        if trouble == self._trouble:
            return
        if trouble:
            say(trouble)
        try:
            self.journal.state(trouble=trouble, trouble_unix_s=str(time.time()))
        except RetryLater as error:
            say(str(error))
            return
        self._trouble = trouble
