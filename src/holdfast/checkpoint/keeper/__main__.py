"""Internal entry point of the keeper process, whose arguments are VERSION SOCKET_FD LOCK_FD LOCK_PATH."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from holdfast import __version__
from holdfast.checkpoint.keeper.config import IGNORED_SIGNALS, OTHER_VERSION_STATUS
from holdfast.checkpoint.keeper.lockfile import Lockfile
from holdfast.checkpoint.keeper.worker import serve

_NICENESS = 5
"""Priority below that of training: the keeper has time until the next save."""
_GC_THRESHOLD = 100_000
"""Parts of thousands of tensors are created and freed as a whole, without reference cycles."""


def main() -> None:
    """Serve one trainer until it has exited and all staged saves are done."""
    version, *rest = sys.argv[1:]
    if version != __version__:
        sys.stderr.write(
            f"The training runs with Holdfast {version}, and {__version__} is installed now. A save does not "
            "mix versions. Start the training again: it resumes with the installed one."
        )
        sys.exit(OTHER_VERSION_STATUS)
    for number in (*IGNORED_SIGNALS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    os.nice(_NICENESS)
    gc.set_threshold(_GC_THRESHOLD)
    socket_fd, lock_fd, lock_path = rest
    serve(socket.socket(fileno=int(socket_fd)), Lockfile.inherit(lock_path, int(lock_fd)))


if __name__ == "__main__":
    main()
