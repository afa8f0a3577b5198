"""Logging of the package: plain lines on stderr, unless the application has configured logging."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator

_PACKAGE = "holdfast"
_PLAIN = logging.Formatter("holdfast: %(message)s")
QUIET_S = 3.0  # time that a wait may take without a line
_TIMED = logging.Formatter("%(asctime)s holdfast: %(message)s", "%Y-%m-%d %H:%M:%S")


class DefaultHandler(logging.Handler):
    """Handler that writes a record to stderr, unless another handler receives it too.

    Other handlers are looked for with each record, so logging may be configured at any time.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, if no other handler receives it."""
        if self._is_handled_elsewhere(record.name):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")  # looked up now: a test or a notebook may replace it
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as in all handlers: a lost line must not end a training
            self.handleError(record)

    def _is_handled_elsewhere(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def get_logger(room: str) -> logging.Logger:
    """Return the logger of a room of the package, such as "checkpointer"."""
    return logging.getLogger(f"{_PACKAGE}.{room}")


@contextlib.contextmanager
def reported_if_slow(report: Callable[[], object]) -> Iterator[None]:
    """Call `report` in another thread if the block takes more than `QUIET_S`."""
    timer = threading.Timer(QUIET_S, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def write_times() -> None:
    """Begin each line with the time, in a process whose stderr is a log file."""
    _default.setFormatter(_TIMED)


_default = DefaultHandler()
_default.setFormatter(_PLAIN)
_logger = logging.getLogger(_PACKAGE)
_logger.addHandler(_default)
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.INFO)
