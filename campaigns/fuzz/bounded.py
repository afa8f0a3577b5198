"""Cases run within limits on processor time and memory; anything but our own errors is a failure."""

from __future__ import annotations

import gc
import resource
import signal
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import HoldfastError

TIME_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 300 << 20
_PACKAGE = str(Path(__file__).resolve().parents[2] / "src" / "holdfast")


class TooLong(BaseException):
    """A case took more processor time than it may."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that is none of ours, and the place in our code that it came through last."""

    kind: str
    place: str
    text: str


def _on_alarm(*_: object) -> None:
    raise TooLong


def limit_memory(num_bytes: int = MEMORY_LIMIT_BYTES) -> None:
    """Limit what this process may allocate from now on; beyond it, MemoryError is raised."""
    gc.collect()
    with Path("/proc/self/status").open() as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, resource.RLIM_INFINITY))


@contextmanager
def _time_limit(seconds: float):
    before = signal.signal(signal.SIGVTALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def run_case(act: Callable[[], object]) -> Failure | None:
    """Return what was wrong with a case; None if it returned or raised one of our errors."""
    try:
        with _time_limit(TIME_LIMIT_S):
            act()
    except HoldfastError:
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)] or frames
        place = f"{ours[-1].filename.removeprefix(_PACKAGE)}:{ours[-1].lineno}"
        return Failure(type(error).__name__, place, "".join(traceback.format_exception(error))[-3000:])
    return None
