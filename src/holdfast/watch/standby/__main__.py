"""Standby process: has imported the modules of a training, and forks each next start of its script."""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import importlib.machinery
import io
import os
import resource
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from holdfast.errors import HoldfastError
from holdfast.system.documents import decode_as
from holdfast.system.environment import KEEP_IN_MEMORY
from holdfast.system.linux.processes import die_with_parent, has_threads
from holdfast.system.units import parse_duration
from holdfast.watch.standby.documents import ImportPlan, PrebuildRequest, ScriptStart
from holdfast.watch.standby.start.sitecustomize import FORWARDED, send_document, surroundings, user_of

_MAX_BYTES = 16 << 20  # of a plan or a start, whose environment may be large
_RECEIVE_S = 10.0
_BUILD_S = 20.0  # to wait for an object that is being built; the process that waits gives up after 30 s
_T = TypeVar("_T")
_NEXT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("HOLDFAST_", "SKYPILOT_", "SLURM_", "NODE_RANK", "PWD", "OLDPWD", "SHLVL", "_"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
"""Beginnings of variables that differ from start to start, and that no library reads during its import."""


class ImportedModules:
    """The imported modules of a training, with the files that they came from."""

    def __init__(self, plan: ImportPlan) -> None:
        self._environment, self._surroundings = dict(os.environ), surroundings()
        sys.path[:] = plan.path
        for name in plan.modules:
            with contextlib.suppress(Exception, SystemExit):  # a start imports it again, and sees the error
                importlib.import_module(name)
        self._has_threads = has_threads()
        files = {getattr(module, "__file__", None) for module in sys.modules.values()}
        self._files = {path: _stamp(path) for path in files if isinstance(path, str)}

    def reason_against(self, start: ScriptStart) -> str:
        """Return why a start must import everything itself; empty if it need not."""
        if self._has_threads:
            return "an imported module starts threads, which no forked process has"
        if any(name.startswith(("/dev/nvidia", "/dev/kfd")) for name in _open_files()):
            return "an imported module uses a GPU, which no forked process can use then"
        for path, stamp in self._files.items():
            if _stamp(path) != stamp:
                return f"{path} has changed"
        for name in sorted({*self._environment, *start.environment}):
            is_same = self._environment.get(name) == start.environment.get(name)
            if not is_same and not name.startswith(_NEXT):
                return f"the variable {name} has changed"
        for name, value in self._surroundings.items():
            if value != start.surroundings.get(name):
                return f"its {name} differ"
        return ""


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; None if it is gone."""
    try:
        found = os.stat(path)  # noqa: PTH116 - of thousands of files, while a training waits
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _open_files() -> Iterator[str]:
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the list itself
            yield str(path.readlink())


class _Running(Struct, frozen=True):
    """Forked training, and the connection to the process that it runs for."""

    pid: int
    pidfd: int
    end: socket.socket


class StandbyServer:
    """Server of the starts of one script.

    Args:
        trainer: pipe that is closed when the training ends that has made this process.
    """

    def __init__(self, modules: ImportedModules, listener: socket.socket, trainer: int) -> None:
        self._modules, self._listener, self._trainer = modules, listener, trainer
        self._running: list[_Running] = []
        self._spares = dict[str, _Running]()  # processes with a built object, by the place of their rank
        self._has_trainer = True
        self._is_over = False  # the training has ended without an error, or this process cannot serve it
        self._poll = select.poll()
        for one in (listener, trainer):
            self._poll.register(one, select.POLLIN)

    def serve(self, linger_s: float) -> ScriptStart | None:
        """Fork each start. Return it in the process that runs it, and None here once no more is expected.

        Args:
            linger_s: time to wait for the next start after a training was killed.
        """
        while self._running or self._has_trainer or not self._is_over:
            found = self._poll.poll(None if self._running or self._has_trainer else linger_s * 1000)
            if not found:
                return None
            fds = {fd for fd, _ in found}
            if self._trainer in fds:
                self._read_trainer()
            # First: a start must not meet the training before it, whose process may have been killed alone.
            for one in [one for one in self._running if {one.pidfd, one.end.fileno()} & fds]:
                self._end(one)
            is_called = self._listener.fileno() in fds
            if is_called and (start := self._answer(self._listener.accept()[0])) is not None:
                return start
        return None

    def _read_trainer(self) -> None:
        if os.read(self._trainer, 1):
            self._is_over = True
        else:
            self._poll.unregister(self._trainer)
            self._has_trainer = False

    def _end(self, one: _Running) -> None:
        """Send the exit status of a training that has ended, or kill one whose process was killed."""
        signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)  # without effect on one that has ended
        status = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
        self._is_over |= status == 0
        with contextlib.suppress(OSError):
            one.end.send(str(status).encode())
        for fd in one.pidfd, one.end:
            self._poll.unregister(fd)
        self._running.remove(one)
        one.end.close()
        os.close(one.pidfd)

    def _answer(self, end: socket.socket) -> ScriptStart | None:
        """Fork what is asked for, or refuse it. Return the start in the process that runs it."""
        fds = list[int]()
        try:
            if user_of(end) == os.getuid():
                end.settimeout(_RECEIVE_S)
                document = _receive(end, fds)
                if not fds:
                    return self._prebuild(_decode(PrebuildRequest, document), end)
                start = _decode(ScriptStart, document)
                if reason := self._modules.reason_against(start):
                    self._close_listener()
                    end.sendall(reason.encode()[:1000])
                elif not self._hand_over(start, document, end, fds):
                    pid, pidfd = self._fork(end)
                    if not pid:
                        _use(fds)
                        return start
                    self._watch(_Running(pid, pidfd, end))
        except (OSError, HoldfastError):
            pass  # a watch that looks for its standby, or a start that was given up
        finally:
            for fd in fds:
                os.close(fd)
        if not any(one.end is end for one in self._running):
            end.close()
        return None

    def _watch(self, one: _Running) -> None:
        """Wait for the end of a training, and of the process that it runs for."""
        self._running.append(one)
        for fd in one.end, one.pidfd:
            self._poll.register(fd, select.POLLIN)
        # The process that waits has no other name of it: a pid may soon be another process's.
        rights = array.array("i", [one.pidfd])
        one.end.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def _fork(self, *ends: socket.socket) -> tuple[int, int]:
        """Fork this process. Return the new process's pid and a descriptor of it; 0 and -1 in that process.

        Args:
            ends: closed in the new process, as all that is this server's.
        """
        pid = os.fork()
        if pid:
            try:
                return pid, os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)  # or the training would run twice
                os.waitpid(pid, 0)
                raise
        die_with_parent()
        os.setsid()
        others = [*self._running, *self._spares.values()]
        for one in (self._listener, *ends, *(one.end for one in others)):
            one.close()
        for one in others:
            os.close(one.pidfd)
        return 0, -1

    # -- objects for the next start --------------------------------------------------------------------------
    def _prebuild(self, request: PrebuildRequest, end: socket.socket) -> ScriptStart | None:
        """Fork a process that builds an object and waits. Return its start in that process."""
        ours, theirs = socket.socketpair()
        pid, pidfd = self._fork(end, ours)
        end.close()
        if pid:
            theirs.close()
            if (before := self._spares.pop(_place(request.environment), None)) is not None:
                self._drop(before)
            self._spares[_place(request.environment)] = _Running(pid, pidfd, ours)
            return None
        try:
            return _build_and_wait(request, theirs)
        except BaseException:  # noqa: BLE001 - of the user's function, which the start calls itself then
            os._exit(1)

    def _hand_over(self, start: ScriptStart, document: bytes, end: socket.socket, fds: list[int]) -> bool:
        """Give a start to the process that has built an object for it. Return False without one."""
        spare = self._spares.pop(_place(start.environment), None)
        if spare is None:
            return False
        spare.end.settimeout(_BUILD_S)
        try:
            spare.end.recv(1)  # it has built the object
            send_document(spare.end, document, fds)
        except OSError:  # it has died, as the function has failed, or takes long
            self._drop(spare)
            return False
        spare.end.close()
        self._watch(_Running(spare.pid, spare.pidfd, end))
        return True

    def _drop(self, spare: _Running) -> None:
        signal.pidfd_send_signal(spare.pidfd, signal.SIGKILL)
        os.waitpid(spare.pid, 0)
        os.close(spare.pidfd)
        spare.end.close()

    def _close_listener(self) -> None:
        self._poll.unregister(self._listener)
        self._listener.close()
        self._is_over = True


def _build_and_wait(request: PrebuildRequest, end: socket.socket) -> ScriptStart:
    from holdfast.watch.standby.prebuilt import build

    os.environ.update(request.environment)
    sys.path[:] = request.path
    build(request.recipe)
    end.sendall(b".")
    fds = list[int]()
    start = _decode(ScriptStart, _receive(end, fds))
    end.close()
    _use(fds)
    for fd in fds:
        os.close(fd)
    return start


def _place(environment: Mapping[str, str]) -> str:
    """Return the number of a rank on its host, which stays when it is started again."""
    return environment.get("LOCAL_RANK", "")


def _use(fds: list[int]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)


def _decode(kind: type[_T], document: bytes) -> _T:
    return decode_as(kind, document, "a request of a standby", max_bytes=_MAX_BYTES, any_text=True)


def _receive(end: socket.socket, fds: list[int]) -> bytes:
    """Receive a document, and append the files that come with it to `fds`."""
    length, found, _, _ = socket.recv_fds(end, 4, 3)
    fds += found
    left = int.from_bytes(length, "big")
    if len(length) < 4 or len(fds) not in (0, 3) or left > _MAX_BYTES:
        raise ConnectionError("this is no document")
    document = bytearray()
    while left > len(document):
        if not (block := end.recv(left - len(document))):
            raise ConnectionError("the start was given up")
        document += block
    return bytes(document)


def run(start: ScriptStart) -> None:
    """Run the script of a start in this process, which becomes as if Python had started for it."""
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    os.umask(start.umask)
    os.sched_setaffinity(0, start.processors)
    for number, soft in enumerate(start.soft_limits):
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))
    for name in FORWARDED:
        how = signal.SIG_IGN if name in start.ignored else signal.SIG_DFL
        signal.signal(getattr(signal, name), how)
    if "SIGINT" not in start.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # that of python's `random` is new in each forked process
    words = start.words[start.position :]
    is_module = words[0] == "-m"
    first = start.folder if is_module else str(Path(words[0]).resolve().parent)
    sys.path[:] = start.path if getattr(sys.flags, "safe_path", False) else [first, *start.path]
    sys.orig_argv = start.words
    sys.argv = words[1:] if is_module else words
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    path = str(Path(words[0]).absolute())
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader)
    main.__dict__.update(__cached__=None, __annotations__={})
    sys.excepthook = partial(_show, path)
    try:
        exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main.__dict__)
    finally:
        # Handlers at exit see it, though what has run this file puts its own back before.
        atexit.register(sys.modules.__setitem__, "__main__", main)


def _show(path: str, kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
    """Print an exception without the frames before the first one of a script, as Python does."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename != path:
        first = first.tb_next
    sys.__excepthook__(kind, error.with_traceback(first or trace), first or trace)


def _linger_s() -> float:
    value = os.environ.get(KEEP_IN_MEMORY, "").strip() or "2m"
    return 0.0 if value == "0" else parse_duration(value, KEEP_IN_MEMORY)


def main() -> None:
    """Listen, import, and serve; in a forked process, run the script."""
    name, plan_fd = sys.argv[1], int(sys.argv[2])
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return  # another rank was first
    for number in FORWARDED:
        signal.signal(getattr(signal, number), signal.SIG_IGN)
    with open(plan_fd, "rb") as file:
        file.seek(0)
        plan = decode_as(ImportPlan, file.read(_MAX_BYTES), "a plan", max_bytes=_MAX_BYTES)
    modules = ImportedModules(plan)
    listener.listen()  # not before: a start meanwhile does not wait
    start = StandbyServer(modules, listener, sys.stdin.fileno()).serve(_linger_s())
    if start is None:
        os._exit(0)  # what the modules do at the exit of a training is not for this process
    run(start)


if __name__ == "__main__":
    main()
