"""Entry of the uploader: `python -m holdfast.writeback DIRECTORY PLACE`; `mount` starts it with terms."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError, InvalidInput
from holdfast.writeback.log import say
from holdfast.writeback.mount import checked_place, made
from holdfast.writeback.terms import Terms, read_terms
from holdfast.writeback.uploader import Uploader, ignore_signals

_NICENESS = 5  # the job comes first


def main() -> int:
    """Serve one directory.

    Returns:
        0 if all is in the bucket at the end, 1 if not, 2 if it could not start.
    """
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.writeback",
        description="Sends the files of a directory to a place, in the order in which they are closed. "
        "Ctrl-C or SIGTERM ends it when all that is closed is sent. `holdfast drain DIRECTORY` tells how far "
        "it is.",
    )
    parser.add_argument("directory", nargs="?", metavar="DIRECTORY", help="made if it is not there")
    parser.add_argument("place", nargs="?", metavar="PLACE", help="path or URL")
    parser.add_argument("--no-fetch", action="store_true", help="leave what the place holds there")
    parser.add_argument("--terms", help=argparse.SUPPRESS)
    parser.add_argument("--ready", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ready is not None and os.fork():
        os._exit(0)  # leaves the uploader to the system: whoever mounts has no child to wait for
    if args.ready is not None:
        os.chdir("/")  # not before: a relative PYTHONPATH is of the mounter's directory
    try:
        terms = read_terms(args.terms) if args.terms else _terms(args)
        uploader = Uploader(terms)
        _listen(uploader, is_own=terms.until_signal)
        uploader.prepare()
    except HoldfastError as error:
        _answer(args.ready, json.dumps({"kind": error.kind, "message": str(error)}))
        say(str(error))
        return 2
    _answer(args.ready, "ready\n")
    return 0 if uploader.run() else 1


def _terms(args: argparse.Namespace) -> Terms:
    if not args.directory or not args.place:
        raise InvalidInput("Give DIRECTORY and PLACE.")
    root = Path(args.directory).absolute()
    url = checked_place(root, args.place)
    made(root)
    return Terms(str(root), url, fetch=not args.no_fetch, until_signal=True)


def _listen(uploader: Uploader, *, is_own: bool) -> None:
    """SIGTERM: the machine goes, or a person has enough; in the foreground Ctrl-C means the same."""
    os.nice(_NICENESS)
    ignore_signals()
    for number in (signal.SIGTERM, *([signal.SIGINT] if is_own else [])):
        signal.signal(number, lambda *_: uploader.hurry())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


def _answer(fd: int | None, text: str) -> None:
    if fd is not None:
        with suppress(BrokenPipeError):  # whoever asked has not waited
            os.write(fd, text.encode())
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
