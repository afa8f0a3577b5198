"""Cases run within limits on processor time and memory; anything but our own errors is a failure."""

from __future__ import annotations

import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import HoldfastError

TIME_LIMIT_S = 2.0
"""Processor time of one case, of user and system together: a busy machine makes no case fail."""
MEMORY_LIMIT_BYTES = 300 << 20
WARM_UP_S = 60.0
"""The same of a first case, which also imports and fills caches."""
_BLOCKED_S = 120.0  # by the clock: a case that waits, as for the other end of a FIFO, takes no processor time
_TRIES = 3
_PACKAGE = str(Path(__file__).resolve().parents[2] / "src" / "holdfast")


class TooLong(BaseException):
    """A case took more processor time than it may, or waits for what does not come."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that is none of ours, and the place in our code that it came through last."""

    kind: str
    place: str
    text: str


def _on_alarm(*_: object) -> None:
    raise TooLong


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Limit what this process may allocate in the block; beyond it, MemoryError is raised."""
    with Path("/proc/self/status").open() as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, _BLOCKED_S)}
    before = {number: signal.signal(number, _on_alarm) for number, _ in timers.values()}
    for timer, (_, limit_s) in timers.items():
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def run_case(
    act: Callable[[], object],
    *,
    memory_bytes: int | None = MEMORY_LIMIT_BYTES,
    processor_s: float = TIME_LIMIT_S,
) -> Failure | None:
    """Return what was wrong with a case; None if it returned or raised one of our errors.

    A case that takes too long is run again: only one that never ends in time has failed.

    Args:
        act: the case.
        memory_bytes: it may allocate at once; None for any number.
        processor_s: it may take.
    """
    failure = None
    for _ in range(_TRIES):
        failure = _run_once(act, memory_bytes, processor_s)
        if failure is None or failure.kind != TooLong.__name__:
            break
    return failure


def _run_once(act: Callable[[], object], memory_bytes: int | None, processor_s: float) -> Failure | None:
    try:
        with (
            _time_limit(processor_s),
            nullcontext() if memory_bytes is None else _memory_limit(memory_bytes),
        ):
            act()
    except HoldfastError as error:
        return _failure(error) if _lacked_memory(error) else None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        return _failure(error)
    return None


def _lacked_memory(error: BaseException | None) -> bool:
    """Return True if memory ran out, although one of our errors was made of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _failure(error: BaseException) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)] or frames
    place = f"{ours[-1].filename.removeprefix(_PACKAGE)}:{ours[-1].lineno}"
    kind = "MemoryError" if _lacked_memory(error) else type(error).__name__
    return Failure(kind, place, "".join(traceback.format_exception(error))[-3000:])
