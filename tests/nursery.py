"""Starts real Python processes quickly: a process that imports torch once and forks a child per program.

`nursery.py serve FD` is that process: a client connects to its socket, sends a JSON command, and receives the
pid of the child, and later its exit status. `nursery.py ask ADDRESS ARGUMENTS` is a client that ends as its
child did: commands that start Python programs, such as `holdfast check`, get it in place of `python`.

Children are ordinary processes with their own pid, session, environment and directory; they share nothing but
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
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

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
    """The forking process, as tests see it.

    Attributes:
        python: words of a command that runs a program in a child, as `python` would.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = str(Path(self._folder.name, "nursery"))
        file = os.path.abspath(__file__)  # noqa: PTH100 - the name by which it was imported
        self.python = [sys.executable, "-I", "-S", file, "ask", self._address]
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(self._address)
            server.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, file, "serve", str(server.fileno())],
                stdin=subprocess.PIPE,  # it ends with this process
                pass_fds=(server.fileno(),),
            )

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
        output.touch()
        pid, lines = _ask(self._address, arguments, output, errors or output, cwd=cwd, env=env)
        child = Child(pid, output)

        def wait() -> None:
            with lines:
                child.ended.put(int(lines.readline()))

        threading.Thread(target=wait, daemon=True).start()
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

    def close(self) -> None:
        """End the forking process."""
        self._process.communicate(timeout=END_TIMEOUT_S)
        self._folder.cleanup()


@functools.cache
def shared() -> Nursery:
    """Return the nursery of this test process, which is started when first needed."""
    found = Nursery()
    atexit.register(found.close)
    return found


def _ask(
    address: str,
    arguments: list[str],
    output: Path,
    errors: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, TextIO]:
    """Have a program started; return its pid, and the file whose next line is its exit status."""
    command = {
        "arguments": arguments,
        "output": str(output),
        "errors": str(errors),
        "cwd": str(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env),
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        lines = server.makefile("rw")
    lines.write(json.dumps(command) + "\n")
    lines.flush()
    return int(lines.readline()), lines


def _end_as_child(address: str, arguments: list[str]) -> None:
    """Run a program, and end as it does."""
    output = Path("/proc/self/fd/1").readlink()
    _, lines = _ask(address, arguments, output, output)
    status = int(lines.readline())
    if status < 0:
        os.kill(os.getpid(), -status)
        signal.pause()
    sys.exit(status)


# -- the forking process -------------------------------------------------------------------------------------


def _serve(server: socket.socket) -> dict[str, Any] | None:
    """Fork a child per command; return the command in a child, None when the test process has ended."""
    import gc
    import importlib
    import selectors

    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what children share is neither copied nor looked through at their end
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(server, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                return None
            if key.fileobj is server:
                with server.accept()[0] as client:
                    lines = client.makefile("rw")
                if not (command := lines.readline()):
                    continue  # the client was killed
                if not (pid := os.fork()):
                    selector.close()
                    server.close()
                    return json.loads(command)
                _tell(lines, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, lines))
                continue
            pid, lines = key.data
            selector.unregister(key.fd)
            os.close(key.fd)
            _tell(lines, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            lines.close()


def _tell(client: TextIO, number: int) -> None:
    with contextlib.suppress(OSError):  # it was killed
        client.write(f"{number}\n")
        client.flush()


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
    _mode, _target, *_rest = sys.argv[1:]
    if _mode == "ask":
        _end_as_child(_target, _rest)
    elif (_command := _serve(socket.socket(fileno=int(_target)))) is not None:
        _become(_command)
