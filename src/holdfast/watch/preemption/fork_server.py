"""Import of the fork server of multiprocessing, so that a notice does not end it.

Its children would take its end for that of the trainer, and exit. The trainer starts the server with blocked
signals. Anywhere else, where none of them is blocked, importing this changes nothing.
"""

from __future__ import annotations

import os
import signal

from holdfast.watch.preemption.signals import SIGNALS


def _reset_in_child() -> None:
    for number in _ignored:
        if number != signal.SIGINT:  # which the server itself sets for its children
            signal.signal(number, signal.SIG_DFL)


_blocked = [number for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()) if number in SIGNALS]
_ignored = [number for number in _blocked if signal.getsignal(number) != signal.SIG_IGN]
for _number in _ignored:
    signal.signal(_number, signal.SIG_IGN)  # drops one that has arrived meanwhile
signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked)
if signal.SIGINT in _ignored:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_child=_reset_in_child)
