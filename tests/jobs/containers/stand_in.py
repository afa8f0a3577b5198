"""Stand-in for podman and docker: a program with their commands, whose containers are mount namespaces.

A container has the files of this machine, except for /srv, which is its own and outlives its process.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.jobs.engine import Job

FOLDER = "HOLDFAST_TEST_RUNTIME"
"""Variable with the folder of a stand-in."""
_CONTAINER = "mount --bind {layer} /srv && echo ready && exec sleep 1000000"


class StandIn:
    """Stand-in for a container runtime, with its images and containers in a folder.

    Args:
        folder: folder for its program, which a test puts first on the PATH.
    """

    def __init__(self, folder: Path, name: str = "podman", answer: str = "false") -> None:
        self.folder, self.name = folder, name
        folder.mkdir(exist_ok=True)
        (folder / "answer").write_text(answer)
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {__file__} {folder} "$@"\n')
        program.chmod(0o755)

    def add_image(self, name: str, *, user: str = "", **variables: str) -> None:
        """Add an image of this machine."""
        config = {"Env": [f"{key}={value}" for key, value in variables.items()], "User": user}
        images = self._images()
        (self.folder / "images.json").write_text(json.dumps({**images, name: config}))

    def will(self, what: str, words: str = "") -> None:
        """Have a command fail with its words (`pull`, `create`, `rm`), or a pull wait (`wait`)."""
        (self.folder / f"fail-{what}").write_text(words)

    def will_not(self, what: str) -> None:
        """Have a command succeed again."""
        (self.folder / f"fail-{what}").unlink()

    def calls(self, command: str) -> list[list[str]]:
        """Return the arguments of all calls of a command so far."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [words for line in lines if (words := json.loads(line))[0] == command]

    def containers(self, job: Job | None = None) -> list[str]:
        """Return the ids of all containers, or of those of a job."""
        found = sorted(self.folder.glob("*.container"))
        return [one.stem for one in found if job is None or f"{job.task_id}/" in one.read_text()]

    def kill(self, container: str) -> None:
        """Kill the process of a container."""
        if pid := self.pid(container):
            os.kill(pid, signal.SIGKILL)

    def serve(self, words: list[str]) -> None:
        """Run a command, print its output, and exit."""
        with (self.folder / "calls").open("a") as file:
            file.write(json.dumps(words) + "\n")
        self._fail_if_asked(words[0])
        {
            "info": lambda: self._print((self.folder / "answer").read_text()),
            "ps": lambda: self._list(words[-1].partition("=")[2]),
            "image": lambda: self._inspect_image(words[-1]),
            "pull": lambda: self._pull(words[-1]),
            "create": lambda: self._create(words),
            "start": lambda: self._start(words[-1]),
            "container": lambda: self._inspect(words[-1]),
            "rm": lambda: self._remove(words[-1]),
        }[words[0]]()

    def _fail_if_asked(self, command: str) -> None:
        path = self.folder / f"fail-{command}"
        if path.exists():
            sys.exit(path.read_text())

    def _print(self, text: str) -> None:
        sys.stdout.write(text + "\n")

    def _images(self) -> dict[str, Any]:
        path = self.folder / "images.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _list(self, label: str) -> None:
        for container in self.containers():
            if label in json.loads((self.folder / f"{container}.container").read_text()):
                self._print(container)

    def _inspect_image(self, name: str) -> None:
        if name not in self._images():
            sys.exit(f"Error: no such image: {name}")
        self._print(json.dumps([{"Id": name, "Config": self._images()[name]}]))

    def _pull(self, name: str) -> None:
        sys.stderr.write(f"Trying to pull {name}...\n")
        sys.stderr.flush()
        if (self.folder / "fail-wait").exists():
            signal.pause()
        self.add_image(name)

    def _create(self, words: list[str]) -> None:
        container = secrets.token_hex(32)
        layer = self.folder / container
        (layer / "home").mkdir(parents=True)
        (layer / "marker").write_text(f"{words[-3]}\n")
        (self.folder / f"{container}.container").write_text(json.dumps(words))
        self._print(container)

    def _start(self, container: str) -> None:
        self._fail_if_asked("start")
        if self.pid(container) == 0:
            user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
            words = ["unshare", "--mount", *user, "--propagation", "slave", "--", "sh", "-c"]
            words.append(_CONTAINER.format(layer=shlex.quote(str(self.folder / container))))
            null, pipe = subprocess.DEVNULL, subprocess.PIPE
            started = subprocess.Popen(words, stdin=null, stdout=pipe, start_new_session=True)
            assert started.stdout is not None
            assert started.stdout.readline() == b"ready\n"
            (self.folder / f"{container}.pid").write_text(str(started.pid))
        self._print(container)

    def pid(self, container: str) -> int:
        """Return the process of a container, or 0 if it does not run."""
        path = self.folder / f"{container}.pid"
        pid = int(path.read_text()) if path.exists() else 0
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return 0
        return pid if b"1000000" in words else 0

    def _inspect(self, container: str) -> None:
        pid = self.pid(container)
        image = json.loads((self.folder / f"{container}.container").read_text())[-3]
        state = {"Running": pid > 0, "Pid": pid}
        self._print(json.dumps([{"Id": container, "Image": image, "State": state}]))

    def _remove(self, container: str) -> None:
        if pid := self.pid(container):
            os.kill(pid, signal.SIGKILL)
        (self.folder / f"{container}.container").unlink()


if __name__ == "__main__":
    found = StandIn.__new__(StandIn)
    found.folder = Path(sys.argv[1])
    found.serve(sys.argv[2:])
