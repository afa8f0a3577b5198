"""Stacks of a process, which its own signal handler writes, and the place that they show."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sysconfig
import time
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path

from msgspec import Struct

from holdfast.errors import HUNG_STATUS
from holdfast.system.linux.locks import try_flock
from holdfast.system.linux.processes import handles_signal, read_stat, start_time, threads_blocking

NAME = "hang"
"""Name of the watch. The first of its words in the pulse is one more than the descriptor for stacks."""
STACKS_SIGNAL = signal.SIGRTMAX - 2
"""Signal that has a trainer write its stacks. Real-time signals are hardly used by other libraries."""
EXIT_SIGNAL = HUNG_STATUS
"""Signal that ends a trainer at once. Its handler is the C function _exit, so its number is the status."""
MAX_FRAMES, MAX_THREADS = 100, 64
"""Frames of a thread that are kept, innermost first, and threads of a process."""
_MAX_TEXT = 300


class Frame(Struct, frozen=True):
    """Call of a function."""

    file: str
    line: int  # 0 if it is not known
    function: str


class Thread(Struct, frozen=True):
    """Thread of a process, with its calls, innermost first."""

    ident: int
    frames: tuple[Frame, ...]


class ProcessStacks(Struct, frozen=True):
    """Threads of a process, and its state."""

    pid: int
    state: str  # a value of `_STATES`, or "gone"
    threads: tuple[Thread, ...]  # empty if the process could not write them


def main_thread(threads: tuple[Thread, ...], ident: int) -> Thread | None:
    """Return the thread that trains; None if its stack was not written."""
    if ident == 0:  # the oldest thread, which is written last
        return threads[-1] if threads else None
    return next((thread for thread in threads if thread.ident == ident), None)


def install_handlers() -> int:
    """Install both handlers, once per process, unless something else handles their signals.

    Return the descriptor of the file that receives the stacks; -1 without one.
    """
    return _install(os.getpid())


@cache
def _install(pid: int) -> int:
    if not handles_signal(pid, EXIT_SIGNAL):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal.restype = ctypes.c_void_p
        libc.signal(EXIT_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))
    if handles_signal(pid, STACKS_SIGNAL):
        return -1
    fd = os.memfd_create("holdfast-stacks")
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)
    return fd


_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-fA-F]+)(?: \[(.*?)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """Return the threads in a text of faulthandler. Lines of other kinds are left out.

    Source: Python's `faulthandler.register(all_threads=True)`.
    """
    found: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            found.append((int(head[1], 16), []))
        elif found and (frame := _FRAME.match(line)):
            file, number, function = frame[1][-_MAX_TEXT:], frame[2], frame[3][:_MAX_TEXT]
            found[-1][1].append(Frame(file, int(number) if number.isdecimal() else 0, function))
    return tuple(Thread(ident, tuple(frames[:MAX_FRAMES])) for ident, frames in found[-MAX_THREADS:])


MAX_WORKERS = 8  # child processes whose stacks are captured, such as workers of data loaders
_WRITE_S, _QUIET_S = 3.0, 0.1
"""Time that a process may take to write its stacks, and time without growth after which they may be whole."""
_LOOK_S = 0.01
_OTHERS_S = 45.0  # time to wait for other captures of the same process, which may be stopped themselves
_MAX_BYTES = 1 << 20
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "stopped by a debugger",
}


def capture(pid: int, stacks_fd: int) -> tuple[ProcessStacks, tuple[ProcessStacks, ...]]:
    """Return the stacks of a trainer, which it writes into a file, and of its workers with its handler.

    Blocks: at most 3 s per process, and 45 s for other captures.
    """
    try:
        file = os.open(f"/proc/{pid}/fd/{stacks_fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it has exited, or has no such file: -1
        return ProcessStacks(pid, read_state(pid), ()), ()
    try:
        # The stacks of two captures must not alternate in it.
        deadline_s = time.monotonic() + _OTHERS_S
        while not try_flock(file):
            if time.monotonic() >= deadline_s:
                return ProcessStacks(pid, read_state(pid), ()), ()
            time.sleep(_LOOK_S)
        own = ProcessStacks(pid, read_state(pid), _dump(pid, file))
        workers = [
            ProcessStacks(child, read_state(child), _dump(child, file))
            for child, _ in zip(_children(pid), range(MAX_WORKERS), strict=False)
            if _is_same_file(child, stacks_fd, file)
        ]
        return own, tuple(workers)
    finally:
        os.close(file)


def read_state(pid: int) -> str:
    """Return the state of a process as a word."""
    found = read_stat(pid)
    return "gone" if found is None else _STATES.get(found.state, "gone")


def _dump(pid: int, file: int) -> tuple[Thread, ...]:
    """Have a process write its stacks into a file that it shares, and return them."""
    born, before = start_time(pid), os.fstat(file).st_size
    if born is None or not handles_signal(pid, STACKS_SIGNAL) or read_state(pid).startswith("stopped"):
        return ()
    blocked = threads_blocking(pid, STACKS_SIGNAL)
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        return ()
    _wait_written(file, before, lambda: threads_blocking(pid, STACKS_SIGNAL) <= blocked)
    if start_time(pid) != born:
        return ()
    return parse_stacks(os.pread(file, _MAX_BYTES, before).decode(errors="replace"))


def _wait_written(file: int, before: int, has_returned: Callable[[], bool]) -> None:
    """Wait until a handler that writes into a file has returned. On a busy machine it may pause for long."""
    deadline_s, size, grown_s = time.monotonic() + _WRITE_S, before, time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        if (found := os.fstat(file).st_size) != size:
            size, grown_s = found, now_s
        elif size > before and now_s - grown_s >= _QUIET_S and has_returned():
            return
        time.sleep(_LOOK_S)


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, task.read_text().split())


def _is_same_file(pid: int, fd: int, file: int) -> bool:
    try:
        return os.path.samestat(Path(f"/proc/{pid}/fd/{fd}").stat(), os.fstat(file))
    except OSError:
        return False


def end_process(pid: int, number: int, *, limit_s: float) -> None:
    """End a process with its exit handler, and after a while with SIGKILL.

    Blocks: until it has exited, at most `limit_s` and as long again.
    """
    born = start_time(pid)
    for ending in (number, signal.SIGKILL):
        if ending == signal.SIGKILL or handles_signal(pid, ending):
            try:
                os.kill(pid, ending)
                os.kill(pid, signal.SIGCONT)  # a stopped process handles no signal
            except OSError:
                return
        deadline_s = time.monotonic() + limit_s
        while born is not None and start_time(pid) == born and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        if start_time(pid) != born:
            return


_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3(?:\.\d+)?/|^<(?:frozen|__array|eval_with)|^<string>$"
)
_TORCH = re.compile(r"(?:^|/)torch/(.*)$")
_HOLDFAST = re.compile(r"(?:^|/)holdfast/([a-z_/]+)\.py$")
_COMPILERS = re.compile(r"/torch/(?:_dynamo|_inductor|_functorch|fx/experimental)/|/triton/|/torch/export/")
_COMPILING = re.compile(r"/torch/(?:_dynamo/convert_frame|_inductor/compile_fx)\.py$")
"""Files whose functions compile. The others of compilers also run the compiled code, in each step."""
_EVALUATES = re.compile(
    r"(?:^|_)(?:eval|evaluate|evaluation|validate|validation|val|generate)(?:_|$)|^test(?:_(?:step|epoch|loop|model))?$"
)
_DEBUGGERS = (
    "pdb.py",
    "bdb.py",
    "pydevd.py",
    "pydevd_frame.py",
    "ipdb/__main__.py",
    "IPython/core/debugger.py",
)


class Kind(str, Enum):
    """Kind of a place."""

    WAITS = "waits"  # for other ranks
    SYNCS = "syncs"  # the exchange that follows each step
    LOADS = "loads"  # data
    WORKS = "works"  # anything else
    COMPILES = "compiles"
    EVALUATES = "evaluates"
    DEBUGS = "debugs"


class Place(Struct, frozen=True):
    """Place of a thread."""

    kind: Kind  # whether it waits for other ranks
    operation: str  # function of a library that it is in, such as "all_reduce"; "" in the user's own code
    user: Frame | None  # innermost frame of the user's script; None if all frames are those of libraries

    def describe(self) -> str:
        """Return the place as text, such as "all_reduce, called at train.py:88 (step)"."""
        if self.user is None:
            return self.operation or "a place without Python frames"
        name = self.user.file.rpartition("/")[2]
        at = f"{name}:{self.user.line} ({self.user.function})"
        return f"{self.operation}, called at {at}" if self.operation else f"{at}"


def find_place(thread: Thread) -> Place:
    """Return the place of a thread."""
    frames = thread.frames
    user = next((one for one in frames if not _is_library(one)), None)
    inner = frames[: frames.index(user)] if user is not None else frames
    kind, operation = next(filter(None, map(_operation, inner)), None) or (Kind.WORKS, _name_of(inner))
    if kind is not Kind.SYNCS:
        if any(one.file.endswith(_DEBUGGERS) for one in frames):
            kind = Kind.DEBUGS
        elif any(_COMPILERS.search(one.file) for one in inner):
            kind = Kind.COMPILES
        elif any(map(_evaluates, frames)):
            kind = Kind.EVALUATES
    return Place(kind, operation, user)


def frame_kind(frame: Frame) -> Kind | None:
    """Return the kind of place that one frame alone decides; None if the frames around it do."""
    if frame.file.endswith(_DEBUGGERS):
        return Kind.DEBUGS
    if _COMPILING.search(frame.file) and "compil" in frame.function:
        return Kind.COMPILES
    if (found := _operation(frame)) is not None:
        return found[0]
    if _evaluates(frame):
        return Kind.EVALUATES
    return None if _is_library(frame) else Kind.WORKS


def _is_library(frame: Frame) -> bool:
    file = frame.file
    return bool(_LIBRARY.search(file)) or file.startswith(_STDLIB) or bool(_HOLDFAST.search(file))


def _evaluates(frame: Frame) -> bool:
    return bool(_EVALUATES.search(frame.function)) and "train" not in frame.function


def _operation(frame: Frame) -> tuple[Kind, str] | None:
    """Return the kind and name of the operation that a frame decides; None for others."""
    if (found := _HOLDFAST.search(frame.file)) and found[1] == "ranks":
        return Kind.SYNCS, "the exchange of the ranks after a step"
    found = _TORCH.search(frame.file)
    file = found[1] if found else ""
    if file.startswith("distributed/"):
        return Kind.WAITS, frame.function
    if file == "autograd/graph.py" and frame.function == "_engine_run_backward":
        return Kind.WAITS, "backward"  # DistributedDataParallel waits for the gradients of other ranks in it
    return (Kind.LOADS, "DataLoader.__next__") if file.startswith("utils/data/") else None


def _name_of(frames: tuple[Frame, ...]) -> str:
    """Return the name of the operation that other library frames, innermost first, are in."""
    inner = next((one for one in frames if not one.file.startswith(_STDLIB)), None)
    if inner is None:
        return frames[-1].function if frames else ""  # the function of Python that was called
    package = "/".join(inner.file.split("/")[-2:])
    return f"{inner.function} ({package}:{inner.line})"
