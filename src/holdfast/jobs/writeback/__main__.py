"""Entry point of the uploader: `python -m holdfast.jobs.writeback DIRECTORY PLACE`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError, InvalidInput
from holdfast.jobs.writeback.config import UploaderConfig
from holdfast.jobs.writeback.mount import create_folder, resolve_place
from holdfast.jobs.writeback.uploader import Uploader
from holdfast.system.documents import decode_as
from holdfast.system.log import get_logger, write_times
from holdfast.system.units import parse_bytes

_log = get_logger("jobs.writeback")

_NICENESS = 5  # the job has priority


def main() -> int:
    """Run the uploader of one directory. Return 0 if all files were uploaded, 1 if not, 2 without a start."""
    write_times()
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.jobs.writeback",
        description="Upload the files of a directory in the order in which they are closed. "
        "Ctrl-C or SIGTERM ends it when all closed files are uploaded. `holdfast drain DIRECTORY` shows the "
        "progress.",
    )
    parser.add_argument("directory", nargs="?", metavar="DIRECTORY", help="directory, created if needed")
    parser.add_argument("place", nargs="?", metavar="PLACE", help="path or URL")
    parser.add_argument("--no-fetch", action="store_true", help="do not download what the place holds")
    parser.add_argument("--max-fetch", metavar="SIZE", help="download at most this much, such as 10GiB")
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("--ready", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ready is not None and os.fork():
        os._exit(0)  # init adopts the uploader, so that the mounting process has no child to reap
    if args.ready is not None:
        os.chdir("/")  # not earlier: a relative PYTHONPATH refers to the mounting process's directory
    try:
        config = _config(args)
        uploader = Uploader(config)
        _install_signals(uploader, is_foreground=config.until_signal)
        uploader.prepare()
    except HoldfastError as error:
        _send_result(args.ready, type(error).__name__, str(error))
        _log.error(error)
        return 2
    _send_result(args.ready)
    return 0 if uploader.run() else 1


def _config(args: argparse.Namespace) -> UploaderConfig:
    if args.config:
        return decode_as(UploaderConfig, args.config, "the config of an uploader", any_text=True)
    if not args.directory or not args.place:
        raise InvalidInput("Give DIRECTORY and PLACE.")
    root = Path(args.directory).absolute()
    url = resolve_place(root, args.place)
    create_folder(root)
    limit = None if args.max_fetch is None else parse_bytes(args.max_fetch, "--max-fetch")
    return UploaderConfig(str(root), url, fetch=not args.no_fetch, fetch_bytes=limit, until_signal=True)


def _install_signals(uploader: Uploader, *, is_foreground: bool) -> None:
    """Finish on SIGTERM, and in the foreground on Ctrl-C. Ignore others, which are meant for the job."""
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, *([signal.SIGINT] if is_foreground else [])):
        signal.signal(number, lambda *_: uploader.finish())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


def _send_result(fd: int | None, error: str = "", message: str = "") -> None:
    """Send the class and the text of an error, or empty texts, to the process that mounts."""
    if fd is not None:
        with suppress(BrokenPipeError):  # the mounting process has not waited
            os.write(fd, json.dumps([error, message]).encode())
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
