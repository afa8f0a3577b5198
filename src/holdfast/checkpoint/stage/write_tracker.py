"""Write tracking: the kernel's record of the pages that this process has written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import weakref
from collections.abc import Callable, Iterable

Range = tuple[int, int]  # first address and the one after the last, both on page boundaries

HUGE_BYTES = 2 << 20  # of a transparent huge page on x86-64, and on arm64 with pages of 4 KiB

_libc = ctypes.CDLL(None, use_errno=True)
_SYSCALLS = {"x86_64": 323, "aarch64": 282, "riscv64": 282}  # userfaultfd
_USER_MODE_ONLY = 1
_NEW_FROM_DEVICE = 0xAA00
_API, _REGISTER, _UNREGISTER, _WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC018AA06
_PROTECT = 1
_FEATURES = 1 << 12 | 1 << 13 | 1 << 15  # shared memory and huge pages; pages not yet touched; asynchronous
_REGISTER_WRITES = 2
_PAGEMAP_SCAN = 0xC0606610
_SCAN_PROTECT, _SCAN_CHECK = 1, 2  # protect the pages that match; fail where writes are not tracked
_TRACKABLE, _WRITTEN, _FILE, _PRESENT, _SWAPPED, _ZERO, _HUGE = (1 << bit for bit in range(7))
_MADV_COLLAPSE = 25
_MAX_FOUND = 1024  # ranges that one call returns; more take more calls


class WriteTracker:
    """Records writes to pages of this process by PyTorch, NumPy, C code or the kernel.

    Tracked pages are write-protected. The kernel lifts the protection of a page at the first write to it and
    continues the write, so a writer waits only for that fault. Writes of other processes to shared memory,
    and of devices to pinned memory, are not recorded.

    Source: userfaultfd(2) with UFFD_FEATURE_WP_ASYNC and the ioctl PAGEMAP_SCAN, Linux 6.7; CRIU and
    Windows's GetWriteWatch use the same for incremental copies.
    """

    def __init__(self) -> None:
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._uffd = -1
        descriptors = [self._pagemap]
        # Also without a call of `close`: what an open descriptor tracks, no other one can.
        self._close = weakref.finalize(self, _close_each, descriptors)
        self._close.atexit = False  # the last save may be copied after that, and would count as written
        try:
            self._uffd = _open_userfaultfd()
            descriptors.append(self._uffd)
            fcntl.ioctl(self._uffd, _API, bytearray(struct.pack("3Q", 0xAA, _FEATURES, 0)))
            self._check()
        except BaseException:
            self.close()
            raise

    def start(self, ranges: Iterable[Range], *, in_huge_pages: bool = False) -> None:
        """Track writes to memory from now on. If most is in huge pages, another call is faster.

        Blocks: 10 ms per GB in pages of 4 KiB, 0.2 ms in huge pages.
        """
        started: list[Range] = []
        try:
            for start, stop in ranges:
                register = struct.pack("4Q", start, stop - start, _REGISTER_WRITES, 0)
                fcntl.ioctl(self._uffd, _REGISTER, bytearray(register))
                started.append((start, stop))  # not before: it may be another tracker's
                if in_huge_pages:  # one flush of the processors' caches of addresses, not one per 2 MiB
                    self._protect(start, stop)
                else:
                    self._scan(start, stop, _SCAN_PROTECT | _SCAN_CHECK)
                    # A page that the kernel is moving to another place, to make room for a huge one, loses
                    # the protection of that call when it arrives (Linux 6.18), and would count as written.
                    # That of `_protect` stays.
                    moving = {"any_of": _WRITTEN | _SWAPPED, "returned": _TRACKABLE}
                    for low, high in self._scan_all(start, stop, _SCAN_CHECK, **moving):
                        self._protect(low, high)
        except OSError:
            self.stop(started)
            raise

    def _protect(self, start: int, stop: int) -> None:
        fcntl.ioctl(self._uffd, _WRITEPROTECT, bytearray(struct.pack("3Q", start, stop - start, _PROTECT)))

    def stop(self, ranges: Iterable[Range]) -> None:
        """Stop tracking `ranges`. Later writes to them cost nothing."""
        for start, stop in ranges:
            with contextlib.suppress(OSError):  # it was unmapped meanwhile: nothing is tracked there
                fcntl.ioctl(self._uffd, _UNREGISTER, bytearray(struct.pack("2Q", start, stop - start)))

    def find_written(self, ranges: Iterable[Range]) -> list[Range]:
        """Return the parts of `ranges` that may have been written since `start`."""
        # A page counts as written unless the kernel still protects it, also if it was unmapped (note 013).
        written: list[Range] = []
        protected = {"inverted": _WRITTEN, "required": _WRITTEN, "any_of": _PRESENT | _SWAPPED}
        for start, stop in ranges:
            at = start
            try:
                for low, high in self._scan_all(start, stop, _SCAN_CHECK, **protected, returned=_TRACKABLE):
                    if low > at:
                        written.append((at, low))
                    at = high
            except OSError:  # it is no longer tracked: another mapping has replaced it
                at = start
            if at < stop:
                written.append((at, stop))
        return written

    def is_own(self, start: int, stop: int) -> bool:
        """Return True if this process has written to all pages of a file's private mapping."""
        low, high = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE
        found: list[Range] = []
        kinds = {"inverted": _FILE, "required": _FILE, "any_of": _PRESENT | _SWAPPED, "returned": _PRESENT}
        reached = self._scan(low, high, 0, found, **kinds)
        return reached == high and sum(stop - start for start, stop in found) == high - low

    def find_small(self, ranges: Iterable[Range]) -> list[Range]:
        """Return the parts of `ranges` in present small pages. The zero page does not count."""
        absent = _HUGE | _ZERO
        kinds = {"inverted": absent, "required": _PRESENT | absent, "returned": _PRESENT}
        return [part for start, stop in ranges for part in self._scan_all(start, stop, 0, **kinds)]

    def _scan_all(self, start: int, stop: int, flags: int, **kinds: int) -> list[Range]:
        """Call PAGEMAP_SCAN until the end of a range, and return the parts that it finds."""
        found: list[Range] = []
        while start < stop:
            start = self._scan(start, stop, flags, found, **kinds)
        return found

    def _scan(
        self,
        start: int,
        stop: int,
        flags: int,
        found: list[Range] | None = None,
        *,
        inverted: int = 0,
        required: int = 0,
        any_of: int = 0,
        returned: int = 0,
    ) -> int:
        """Call PAGEMAP_SCAN once, append the results to `found`, and return the address reached."""
        number = 0 if found is None else _MAX_FOUND
        vector = (ctypes.c_uint64 * (3 * number))()
        address = ctypes.addressof(vector) if number else 0
        kinds = inverted, required, any_of, returned
        arguments = bytearray(struct.pack("12Q", 96, flags, start, stop, 0, address, number, 0, *kinds))
        num_found = fcntl.ioctl(self._pagemap, _PAGEMAP_SCAN, arguments)
        if found is not None:
            found.extend((vector[3 * i], vector[3 * i + 1]) for i in range(num_found))
        return struct.unpack_from("Q", arguments, 32)[0]

    def _check(self) -> None:
        """Track two pages, write to one, and check that only that one is found."""
        page = mmap.PAGESIZE
        memory = mmap.mmap(-1, 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        tracked = [(start, start + 2 * page)]
        self.start(tracked)
        memory[page] = 1
        found = self.find_written(tracked)
        self.stop(tracked)
        if found != [(start + page, start + 2 * page)]:
            raise OSError(errno.ENOSYS, "writes to pages are not recorded")

    def close(self) -> None:
        """Stop tracking everything."""
        self._close()
        self._uffd = self._pagemap = -1


def _close_each(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _open_userfaultfd() -> int:
    number = _SYSCALLS.get(platform.machine())
    error = errno.ENOSYS
    if number is not None:
        descriptor = _libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if descriptor >= 0:
            return descriptor
        error = ctypes.get_errno()
    try:
        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        raise OSError(error, os.strerror(error), "userfaultfd") from None
    try:
        return fcntl.ioctl(device, _NEW_FROM_DEVICE, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
    finally:
        os.close(device)


def use_huge_pages(ranges: Iterable[Range], *, until: Callable[[], bool]) -> None:
    """Ask the kernel to move memory that is present into huge pages, which are tracked much faster.

    The content does not change. If the kernel has no huge page left, the pages stay small. `until` is called
    between two huge pages; True ends the work.

    Blocks: 0.3 to 5 ms per huge page.
    """
    for start, stop in ranges:
        for at in range(-(-start // HUGE_BYTES) * HUGE_BYTES, stop - HUGE_BYTES + 1, HUGE_BYTES):
            if until():
                return
            _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_BYTES), _MADV_COLLAPSE)
