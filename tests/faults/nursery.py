"""Starts real trainer processes quickly: a process that imports torch once and forks a child per trainer.

Run as a script it is that process: it reads one JSON command per line and reports each child's end. Its
children are ordinary processes with their own pid and process group; nothing but the import is shared.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
END_TIMEOUT_S = 120


@dataclass
class Child:
    """A running trainer."""

    pid: int
    output: Path
    ended: queue.Queue[int] = field(default_factory=queue.Queue)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if the process is still there."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def wait(self) -> int:
        """Exit status; -N if killed by signal N."""
        return self.ended.get(timeout=END_TIMEOUT_S)

    def said(self) -> str:
        """What it has printed."""
        return self.output.read_text()


class Nursery:
    """The forking process, as tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._born: queue.Queue[int] = queue.Queue()
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def start(self, arguments: list[str], output: Path, **env: str) -> Child:
        """Start `trainer.py` with `arguments` in a new process."""
        assert self._process.stdin is not None
        command = {"arguments": arguments, "env": env, "output": str(output)}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        pid = self._born.get(timeout=END_TIMEOUT_S)
        child = Child(pid, output)
        with self._lock:
            self._children[pid] = child
            if pid in self._early:
                child.ended.put(self._early.pop(pid))
        return child

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


def _serve() -> None:
    import selectors

    sys.path.insert(0, str(HERE))
    import trainer  # noqa: F401  # pyright: ignore[reportUnusedImport] - imported for its imports

    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ, None)
    rest = b""
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                _tell("ended", key.data, os.waitstatus_to_exitcode(status))
                continue
            text = os.read(0, 65536)
            if not text:
                return
            *lines, rest = (rest + text).split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _tell("born", pid)


def _tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _fork(command: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _become(command)
        status = 0
    except SystemExit as error:
        import atexit

        atexit._run_exitfuncs()
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - a child must never go on as the nursery
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _become(command: dict[str, Any]) -> None:
    import importlib

    import trainer

    from holdfast import killpoint

    os.setsid()
    output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.environ.update(command["env"])
    importlib.reload(killpoint)
    sys.argv = ["trainer.py", *command["arguments"]]
    trainer.main()


if __name__ == "__main__":
    _serve()
