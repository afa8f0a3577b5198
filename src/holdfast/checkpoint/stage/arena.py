"""Arenas: shared-memory buffers that each hold one staged file image, recycled and limited."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from holdfast.errors import InvalidInput, RetryLater
from holdfast.system.log import get_logger
from holdfast.system.process_exit import complete_at_exit
from holdfast.system.units import format_bytes

_MADV_POPULATE_WRITE = 23  # Linux 5.14; without it the first copy pays for the page faults
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_FDS_PER_ARENA = 3
"""Descriptors of a queued save: of its arena, and two in the outbox of the keeper."""
_MAX_LEFT_FDS = 2000  # of the training; half of all if that is less
_MAX_ARENAS = 8192  # each is a mapping, of which Linux allows a process 65,530
_libc = ctypes.CDLL(None, use_errno=True)
_log = get_logger("checkpoint.stage")


def _cudart() -> Any:
    return torch.cuda.cudart()


def _clear_cuda_error() -> None:
    # The runtime keeps an error until a kernel is launched, and would raise it for one of the training.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


class Arena:
    """A memfd of whole pages, mapped into this process; /dev/shm has only 64 MB in most containers."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number  # identifies it to the keeper, unique in this process
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create(f"holdfast-arena-{number}")
        try:
            os.ftruncate(self.fd, self.num_bytes)
            # (num_bytes,) uint8, page-aligned. Unlike `mmap.mmap`, this keeps no second descriptor.
            self.bytes = torch.from_file(
                f"/proc/self/fd/{self.fd}", shared=True, size=self.num_bytes, dtype=torch.uint8, device="cpu"
            )
        except BaseException:
            os.close(self.fd)
            raise
        self.plan: object = None  # plan of the last save here
        self.views: list[torch.Tensor] = []  # the plan's tensors here, filled by SavePlan.views
        self.is_pinned: bool | None = None  # None: not tried

    def prefault(self) -> None:
        """Allocate all pages now.

        Blocks: for about 1 s per GB of memory that the machine has not touched before; releases the GIL.
        """
        try:
            os.posix_fallocate(self.fd, 0, self.num_bytes)
        except OSError as error:
            raise RetryLater(
                f"The machine does not have {format_bytes(self.num_bytes)} of memory for an arena: "
                f"{error.strerror}. Lower memory=, or give the container more."
            ) from error
        address = ctypes.c_void_p(self.bytes.data_ptr())
        _libc.madvise(address, ctypes.c_size_t(self.num_bytes), _MADV_POPULATE_WRITE)

    def pin(self) -> None:
        """Page-lock for CUDA, so that copies from the device overlap computation. Once per arena.

        If CUDA refuses, a warning is logged: copies are exact without it, but slower.
        """
        if self.is_pinned is not None:
            return
        status = int(_cudart().cudaHostRegister(self.bytes.data_ptr(), self.num_bytes, _PORTABLE))
        self.is_pinned = status == 0
        if not self.is_pinned:
            _clear_cuda_error()
            _log.warning(
                f"CUDA refused to page-lock {format_bytes(self.num_bytes)} (cudaHostRegister: error "
                f"{status}), so that saves slow down training. Raise the memlock limit (ulimit -l), or lower "
                "memory=."
            )

    def free(self) -> None:
        """Release the pages at once, also those that a keeper maps. Only if no process reads them.

        The length stays: a keeper may still offer the arena to the next attempt, which then finds a hole
        instead of a mapping without memory.
        """
        how = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        _libc.fallocate(self.fd, how, ctypes.c_long(0), ctypes.c_long(self.num_bytes))

    def close(self) -> None:
        """Release the memory. The keeper's own mapping of it stays valid."""
        if self.is_pinned and int(_cudart().cudaHostUnregister(self.bytes.data_ptr())) != 0:
            _clear_cuda_error()
        self.views.clear()
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")  # unmapped with the last view of it
        os.close(self.fd)


def max_arenas() -> int:
    """Return the number of arenas that leave enough descriptors to the training."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = soft - min(soft // 2, _MAX_LEFT_FDS)
    most = _MAX_ARENAS if soft == resource.RLIM_INFINITY else left // _FDS_PER_ARENA
    return max(2, min(most, _MAX_ARENAS))


class Arenas:
    """All arenas of this process, together at most `cap_bytes`, and `max_arenas()` at construction.

    A limit that does not allow `min_number` of them is an error, as training might wait for ever.
    """

    def __init__(self, cap_bytes: int, min_number: int = 1) -> None:
        self.cap_bytes, self._min_number = cap_bytes, min_number
        self._max_number = max_arenas()
        self._free: list[Arena] = []
        self._all: dict[int, Arena] = {}
        self._num_bytes = 0  # of all; a queue of saves may have thousands
        self._count = 0
        self._preparing: Arena | None = None
        self._thread: threading.Thread | None = None  # prepares it
        self._closed = False
        self._refused: RetryLater | None = None
        self._lock = threading.RLock()  # taken directly: Ctrl+C in Condition.__enter__ leaves it locked
        self._changed = threading.Condition(self._lock)

    def numbers(self) -> list[int]:
        """Return the numbers of all existing arenas."""
        with self._lock:
            return list(self._all)

    def prepare(self, num_bytes: int, *, then: Callable[[Arena], object]) -> None:
        """Prepare one arena in the background if none exists; then call `then` with it."""
        with self._lock:
            if self._all or num_bytes > self.cap_bytes:
                return
            arena = self._preparing = self._new(num_bytes)
        complete_at_exit(self)
        prefault = partial(self._prefault, arena, then)
        self._thread = threading.Thread(target=prefault, name="holdfast-prefault", daemon=True)
        self._thread.start()

    def end_with_interpreter(self, timeout_s: float) -> None:
        """Complete the preparation of an arena."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _prefault(self, arena: Arena, then: Callable[[Arena], object]) -> None:
        try:
            arena.prefault()
            then(arena)
        except RetryLater as error:
            self._refused = error  # raised by the next acquire
        finally:
            with self._lock:
                self._preparing = None
                self._free.append(arena)
                if self._closed:
                    self._give_back()
                self._changed.notify_all()

    def wait_prepared(self) -> None:
        """Wait for the arena that `prepare` makes."""
        with self._lock:
            self._changed.wait_for(lambda: not self._preparing)
            self._raise_refused()

    def _raise_refused(self) -> None:
        if (error := self._refused) is not None:
            self._refused = None
            self._drop_free()
            raise error

    def _new(self, num_bytes: int) -> Arena:
        self._count += 1
        try:
            arena = Arena(self._count, num_bytes)
        except (OSError, RuntimeError) as error:  # torch raises the latter, with the same text
            raise RetryLater(
                f"The system refused an arena of {format_bytes(num_bytes)}: {error}. Nothing was "
                "saved. Lower memory=, or raise the limit that was reached (open files, address space)."
            ) from error
        self._all[arena.number] = arena
        self._num_bytes += arena.num_bytes
        return arena

    def has_room(self, num_bytes: int) -> bool:
        """Return True if `acquire` would not wait for an earlier save."""
        with self._lock:
            if num_bytes + mmap.PAGESIZE > self.cap_bytes:
                return True  # waiting would not help; acquire raises
            soon = self._preparing is not None and self._preparing.num_bytes >= num_bytes
            return soon or self._available(num_bytes)

    def _available(self, num_bytes: int) -> bool:
        if any(arena.num_bytes >= num_bytes for arena in self._free):
            return True
        if self._preparing:
            return False  # waiting for that one is better than touching as much memory again
        if len(self._all) - len(self._free) >= self._max_number:
            return False
        busy = self._num_bytes - sum(arena.num_bytes for arena in self._free)
        return busy + num_bytes + mmap.PAGESIZE <= self.cap_bytes

    def acquire(self, num_bytes: int) -> Arena:
        """Return a free arena of at least `num_bytes`.

        Blocks: until an arena is free, if the limit does not allow another.
        """
        if self._min_number * (num_bytes + mmap.PAGESIZE) > self.cap_bytes:
            number = f"an arena of {format_bytes(num_bytes)}"
            if self._min_number > 1:
                number = f"{self._min_number} arenas of {format_bytes(num_bytes)} with peers"
            raise InvalidInput(
                f"A save of this rank needs {number}, but memory= allows {format_bytes(self.cap_bytes)} in "
                "all. Nothing was saved. Raise memory=."
            )
        with self._lock:
            self._changed.wait_for(lambda: self._available(num_bytes))
            self._raise_refused()
            for arena in self._free:
                if arena.num_bytes >= num_bytes:
                    self._free.remove(arena)
                    return arena
            self._drop_free()  # too small for the current state
            return self._new(num_bytes)

    def _drop_free(self) -> None:
        for arena in self._free:
            del self._all[arena.number]
            self._num_bytes -= arena.num_bytes
            arena.free()
            arena.close()
        self._free.clear()

    def release(self, arena: Arena) -> None:
        """Return an arena for the next save."""
        with self._lock:
            if arena.number in self._all:
                self._free.append(arena)
            self._changed.notify_all()

    def close(self) -> None:
        """Release all memory. No copy may be running; one arena may still be in preparation."""
        with self._lock:
            self._closed = True
            if self._preparing is None:
                self._give_back()

    def _give_back(self) -> None:
        for arena in self._all.values():
            arena.close()
        self._all.clear()
        self._free.clear()
        self._num_bytes = 0
