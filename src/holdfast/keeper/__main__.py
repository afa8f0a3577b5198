"""Entry of the keeper process: `python -m holdfast.keeper SOCKET_FD TRAINER_PID`; not for people."""

from __future__ import annotations

import os
import signal
import socket
import sys

from holdfast.keeper.process import serve
from holdfast.keeper.terms import IGNORED_SIGNALS

_NICENESS = 5  # training comes first; what the keeper does has until the next save


def main() -> None:
    """Serve one trainer until it is gone and all its staged saves are done."""
    for number in (*IGNORED_SIGNALS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    os.nice(_NICENESS)
    serve(socket.socket(fileno=int(sys.argv[1])), trainer_pid=int(sys.argv[2]))


if __name__ == "__main__":
    main()
