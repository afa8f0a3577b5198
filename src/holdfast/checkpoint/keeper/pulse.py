"""Pulse of a trainer: its newest step, the durations of the last steps and its phase, in shared memory."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Iterator

from msgspec import Struct

from holdfast.errors import Corrupt, InvalidInput

NUM_DURATIONS = 100
"""Steps whose durations are kept."""
_MAGIC = 0x316573_6C757064
_SIZE = 4096
_NAME_BYTES = 64

# Positions of 64-bit words in the memory.
_IS_TRAINING, _STARTED_AT, _BEATS, _STEP, _BEAT_NS = 1, 2, 3, 4, 5
_PHASE_COUNT, _PHASE_NS, _THREAD, _KERNEL_THREAD = 6, 7, 9, 10
_NAME = 16
_DURATIONS = 32
_SLOTS = _DURATIONS + NUM_DURATIONS
NUM_SLOTS = 32
"""Watches that can have words of their own in the pulse."""
NUM_WORDS = 8
"""Words of one watch."""


class TrainerProgress(Struct, frozen=True):
    """Progress of a trainer at one moment. Times are of the machine's monotonic clock."""

    is_training: bool  # within its loop, so that the next step is expected
    beats: int  # completed steps of the process
    beats_here: int  # completed steps since the loop began, or since its last restore
    step: int  # newest completed step
    beat_ns: int  # time of its completion, or of the loop's begin
    phase: str  # name of the phase that the trainer is in; "" for a step
    phase_count: int  # number of phases that have begun or ended
    phase_ns: int  # time of the last of them; 0 without any
    durations_s: tuple[float, ...]  # of the last steps, without their phases; in no order
    thread: int  # identifier of the thread that trains
    kernel_thread: int = 0  # the kernel's identifier of it; 0 before a loop began
    slots: tuple[int, ...] = ()  # words of the watches; see `words`

    def words(self, watch: str) -> tuple[int, ...]:
        """Return the words of a watch; zeros if it has written none."""
        marks, mark = self.slots[:: 1 + NUM_WORDS], _digest(watch)
        if mark not in marks:
            return (0,) * NUM_WORDS
        at = marks.index(mark) * (1 + NUM_WORDS) + 1
        return self.slots[at : at + NUM_WORDS]


class Pulse:
    """Writer of a trainer's pulse.

    A step costs a few stores to memory and no system call. The memory is private until `share`.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._words: memoryview[int] = memoryview(bytearray(_SIZE)).cast("q")
        self._words[0] = _MAGIC
        self._slots: dict[str, int] = {}  # position of the words of each watch
        self._beats = 0
        self._began_ns = time.monotonic_ns()  # of the running step
        self._in_phases_ns = 0
        self._thread = 0
        self._phases: list[str] = []

    def share(self) -> int:
        """Return a descriptor of the memory. Other processes of this user open it below /proc."""
        if self._fd < 0:
            self._fd = os.memfd_create("holdfast-pulse")
            os.ftruncate(self._fd, _SIZE)
            shared = memoryview(mmap.mmap(self._fd, _SIZE)).cast("q")
            shared[:] = self._words
            self._words = shared
        return self._fd

    @property
    def thread(self) -> int:
        """Identifier of the thread that trains; 0 before a loop began."""
        return self._thread

    @property
    def kernel_thread(self) -> int:
        """The kernel's identifier of that thread; 0 before a loop began."""
        return self._words[_KERNEL_THREAD]

    @property
    def is_in_loop(self) -> bool:
        """True within a loop that has completed its first step."""
        words = self._words
        return bool(words[_IS_TRAINING]) and self._beats > words[_STARTED_AT]

    @property
    def is_in_phase(self) -> bool:
        """True within a phase."""
        return bool(self._phases)

    def words(self, watch: str) -> memoryview[int]:
        """Return the words of a watch, which only that watch writes. `share` moves them."""
        at = self._slots.get(watch)
        if at is None:
            if len(self._slots) == NUM_SLOTS:
                raise InvalidInput(
                    f"At most {NUM_SLOTS} watches can write to the pulse, and {watch!r} is one more."
                )
            at = self._slots[watch] = _SLOTS + len(self._slots) * (1 + NUM_WORDS) + 1
            self._words[at - 1] = _digest(watch)
        return self._words[at : at + NUM_WORDS]

    def begin(self, step: int) -> None:
        """Record that a loop begins after `step`. Its first step may take long."""
        words = self._words
        self._thread = words[_THREAD] = threading.get_ident()
        words[_KERNEL_THREAD] = threading.get_native_id()
        self._began_ns = words[_BEAT_NS] = time.monotonic_ns()
        self._in_phases_ns = 0
        words[_STARTED_AT], words[_STEP], words[_IS_TRAINING] = self._beats, step, 1

    def beat(self, step: int) -> None:
        """Record that a step is complete."""
        words, now_ns = self._words, time.monotonic_ns()
        if not words[_IS_TRAINING]:
            self.begin(step)
        elif self._beats > words[_STARTED_AT]:  # the first step compiles and connects
            took_ns = max(1, now_ns - self._began_ns - self._in_phases_ns)
            words[_DURATIONS + self._beats % NUM_DURATIONS] = took_ns
        self._beats += 1
        self._began_ns, self._in_phases_ns = now_ns, 0
        words[_STEP], words[_BEAT_NS], words[_BEATS] = step, now_ns, self._beats

    def end(self) -> None:
        """Record that no step is expected any more."""
        self._words[_IS_TRAINING] = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of the thread that trains. Other threads change nothing."""
        if self._thread not in (0, threading.get_ident()):
            yield
            return
        began_ns = time.monotonic_ns()
        self._phases.append(name)
        self._write_phase(began_ns)
        try:
            yield
        finally:
            self._phases.pop()
            now_ns = time.monotonic_ns()
            if not self._phases:
                self._in_phases_ns += now_ns - began_ns
            self._write_phase(now_ns)

    def _write_phase(self, now_ns: int) -> None:
        name = self._phases[-1] if self._phases else ""
        raw = name.encode(errors="replace")[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        self._words[_NAME : _NAME + _NAME_BYTES // 8] = memoryview(raw).cast("q")
        self._words[_PHASE_NS] = now_ns
        self._words[_PHASE_COUNT] += 1

    def close(self) -> None:
        """Release the shared memory. Readers keep theirs."""
        self.end()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._words = memoryview(bytearray(_SIZE)).cast("q")
            os.close(fd)


class PulseReader:
    """Reader of the pulse of another process, also after its death. It takes over the descriptor."""

    def __init__(self, fd: int) -> None:
        try:
            if os.fstat(fd).st_size != _SIZE:
                raise Corrupt(f"Descriptor {fd} is not that of a pulse.")
            self._memory = mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("q")
        if self._words[0] != _MAGIC:
            self.close()
            raise Corrupt(f"Descriptor {fd} is not that of a pulse.")

    @classmethod
    def of_process(cls, pid: int, fd: int) -> PulseReader:
        """Return a reader of the pulse of another process of this user, from its descriptor there."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))

    def read(self) -> TrainerProgress:
        """Return the present progress."""
        words = self._words
        raw = self._memory[8 * _NAME : 8 * _NAME + _NAME_BYTES]
        durations = words[_DURATIONS : _DURATIONS + NUM_DURATIONS]
        return TrainerProgress(
            is_training=bool(words[_IS_TRAINING]),
            beats=words[_BEATS],
            beats_here=words[_BEATS] - words[_STARTED_AT],
            step=words[_STEP],
            beat_ns=words[_BEAT_NS],
            phase=raw.rstrip(b"\0").decode(errors="replace"),
            phase_count=words[_PHASE_COUNT],
            phase_ns=words[_PHASE_NS],
            durations_s=tuple(one / 1e9 for one in durations if one > 0),
            thread=words[_THREAD],
            kernel_thread=words[_KERNEL_THREAD],
            slots=tuple(words[_SLOTS : _SLOTS + NUM_SLOTS * (1 + NUM_WORDS)]),
        )

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._memory.close()


def _digest(watch: str) -> int:
    """Return the number that marks the words of a watch; never 0."""
    return int.from_bytes(hashlib.blake2b(watch.encode(), digest_size=7).digest(), "big") | 1
