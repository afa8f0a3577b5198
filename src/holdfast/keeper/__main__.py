"""Entry of the keeper process: `python -m holdfast.keeper SOCKET_FD TRACE_FD TRACE_PATH`; not for people."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from holdfast.keeper.config import IGNORED_SIGNALS
from holdfast.keeper.presence import Presence
from holdfast.keeper.process import serve

_NICENESS = 5  # training comes first; what the keeper does has until the next save


def main() -> None:
    """Serve one trainer until it is gone and all its staged saves are done."""
    for number in (*IGNORED_SIGNALS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    os.nice(_NICENESS)
    gc.set_threshold(
        100_000
    )  # parts of thousands of tensors are built and dropped as a whole, without cycles
    socket_fd, trace_fd, trace_path = sys.argv[1:]
    serve(socket.socket(fileno=int(socket_fd)), Presence.adopt(trace_path, int(trace_fd)))


if __name__ == "__main__":
    main()
