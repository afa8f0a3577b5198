"""Starts real Python processes quickly: a process that imports torch once and forks a child per program.

Run as a script it is that process: it reads one JSON command per line and reports each child's end. Its
children are ordinary processes with their own pid, session, environment and directory; they share nothing but
the imports, which take a fresh interpreter 2 to 5 seconds of processor time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

END_TIMEOUT_S = 600
"""Limit of each wait: only what hangs reaches it, on however busy a machine."""
# The first step of an optimizer imports `torch._dynamo`.
PRELOADED = (
    *("numpy", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo"),
    "holdfast.checkpoint.run",
)


@dataclass
class Child:
    """A running program."""

    pid: int
    output: Path
    ended: queue.Queue[int] = field(default_factory=queue.Queue)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if the process is still there. Its number may be another's after its end."""
        if self.ended.empty():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Exit status; -N if killed by signal N."""
        status = self.ended.get(timeout=timeout_s)
        self.ended.put(status)
        return status

    def said(self) -> str:
        """Return its output so far."""
        return self.output.read_text()


class Nursery:
    """The forking process, as tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],  # noqa: PTH100 - the name by which it was imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._born: queue.Queue[int] = queue.Queue()
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def start(
        self,
        arguments: list[str],
        output: Path,
        *,
        errors: Path | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a program in a new process, by default with the directory and environment of this one.

        The arguments are those of `python`: perhaps `-W` with an action; a script, `-c` with code, or `-m`
        with a module; then the program's own. Output is appended to the files, or all of it to `output`.
        """
        assert self._process.stdin is not None
        command = {
            "arguments": arguments,
            "output": str(output),
            "errors": str(errors or output),
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        output.touch()
        with self._starting:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            pid = self._born.get(timeout=END_TIMEOUT_S)
        child = Child(pid, output)
        with self._lock:
            self._children[pid] = child
            if pid in self._early:
                child.ended.put(self._early.pop(pid))
        return child

    def run(
        self,
        arguments: list[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = END_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as `subprocess.run` does; for the arguments see `start`."""
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            child = self.start(arguments, output, errors=errors, cwd=cwd, env=env)
            try:
                status = child.wait(timeout_s)
            except queue.Empty:
                child.kill()
                child.wait()
                said = output.read_text() + errors.read_text()
                raise AssertionError(f"still running after {timeout_s:.0f} s; it printed:\n{said}") from None
            return subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, pid, *status = line.split()
            if word == "born":
                self._born.put(int(pid))
                continue
            with self._lock:
                child = self._children.pop(int(pid), None)
                if child is None:
                    self._early[int(pid)] = int(status[0])
                else:
                    child.ended.put(int(status[0]))

    def close(self) -> None:
        """End the forking process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(END_TIMEOUT_S)
        self._listener.join(END_TIMEOUT_S)
        self._process.stdout.close()


@functools.cache
def shared() -> Nursery:
    """Return the nursery of this test process, which is started when first needed."""
    found = Nursery()
    atexit.register(found.close)
    return found


# -- the forking process -------------------------------------------------------------------------------------


def _serve() -> dict[str, Any] | None:
    """Fork a child per command; return the command in a child, None when no more come."""
    import gc
    import importlib
    import selectors

    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what children share is neither copied nor looked through at their end
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ, None)
    rest = b""
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                _report("ended", key.data, os.waitstatus_to_exitcode(status))
                continue
            text = os.read(0, 65536)
            if not text:
                return None
            *lines, rest = (rest + text).split(b"\n")
            for line in lines:
                if not (pid := os.fork()):
                    return json.loads(line)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _report("born", pid)


def _report(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _become(command: dict[str, Any]) -> None:
    """Run a program as a fresh interpreter would, at the end of this one."""
    import importlib
    import runpy
    import types
    import warnings

    from holdfast.system import failpoint

    os.setsid()
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(command["output"], append), 1)
    os.dup2(os.open(command["errors"], append), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(command["env"])
    importlib.reload(failpoint)  # reads the environment when it is imported
    tempfile.tempdir = None  # as does tempfile, which a preloaded module may have used
    os.chdir(command["cwd"])
    given = command["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in given if path and path not in sys.path[1:]]
    kind, *rest = command["arguments"]
    if kind == "-W":
        warnings.simplefilter(rest[0])  # pyright: ignore[reportArgumentType] - an action
        kind, *rest = rest[1:]
    if kind == "-m":
        sys.argv = rest
        sys.path[0] = command["cwd"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv = [kind, *rest]
        sys.path[0] = str(Path(kind).resolve().parent)
        main.__file__ = kind
        code = compile(Path(kind).read_bytes(), kind, "exec", dont_inherit=True)
    exec(code, main.__dict__)


if __name__ == "__main__":
    _command = _serve()
    if _command is not None:
        _become(_command)
