"""Import of the fork server of multiprocessing, so that a notice does not end it.

Its children would take its end for that of the trainer, and exit. The trainer starts the server with blocked
signals. Anywhere else, where none of them is blocked, importing this changes nothing.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from holdfast.notice.signals import SIGNALS


def _leave_to_the_trainer(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


def _reset_in_child() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is _leave_to_the_trainer:
            signal.signal(number, signal.SIG_DFL)


_blocked = [number for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()) if number in SIGNALS]
for _number in _blocked:
    signal.signal(_number, _leave_to_the_trainer)
signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked)
os.register_at_fork(after_in_child=_reset_in_child)
