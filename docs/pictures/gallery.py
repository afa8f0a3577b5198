"""Makes the gallery: provokes each trouble in a real training, and writes the output into docs/gallery.md.

`python docs/pictures/gallery.py` runs all scenes; names of scenes as arguments run only those. Each scene
replaces the block `<!-- scene NAME -->` of the page: its commands and all that they printed. Only the
temporary folder and the name of this machine are replaced. The pictures need Chromium and its driver.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "gallery.md"
BIN = Path(sys.executable).parent
LIMIT_S = 300


class Stage:
    """A folder with the training, and a record of the commands and of what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()
        shutil.copy(HERE / "gallery_train.py", folder / "train.py")
        self.home = folder / "runs" / "gpt"
        own = {"HOME": str(folder / "home"), "HOLDFAST_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}
        runtime = {"HOLDFAST_RUNTIME_DIR": str(folder / "runtime"), "COLUMNS": "100"}
        self.environment = {**os.environ, **own, **runtime, "PATH": f"{BIN}:{os.environ['PATH']}"}

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command, and record it."""
        self.lines.append(f"$ {command}")
        return subprocess.Popen(
            shlex.split(command),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str, *, status: int = 0, only: str = "") -> str:
        """Run a command to its end, and record its output, or the lines of it that match `only`."""
        process = self.start(command)
        output = process.communicate(timeout=LIMIT_S)[0]
        if process.returncode != status:
            raise RuntimeError(f"{command} ended with {process.returncode}:\n{output}")
        self.record(output, only)
        if status:
            self.lines.append(f"(exit status {status})")
        return output

    def run_until(self, command: str, wanted: str, *, only: str) -> None:
        """Run a command until it has printed a text, and kill it with all that it has started."""
        self.lines.append(f"$ {command}")
        deadline, path = time.monotonic() + LIMIT_S, self.folder / "output.txt"
        with path.open("w") as file:
            process = subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self.environment, stdout=file, stderr=file
            )
        while wanted not in path.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        started = descendants(process.pid)
        for pid in (process.pid, *started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if wanted not in (output := path.read_text()):
            raise RuntimeError(f"{command} has not printed {wanted!r}:\n{output}")
        self.record(output, only)

    def train_and_kill(self, after_step: int, steps: int) -> None:
        """Start the training, and kill it once a checkpoint of a step is complete."""
        process = self.start(f"python train.py plain {steps}")
        deadline = time.monotonic() + LIMIT_S
        while not list(self.home.glob(f"step-{after_step:08}/*manifest*.json")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the training has not saved step {after_step}")
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        self.record(output, "step|holdfast:")
        self.lines.append("Killed")

    def record(self, output: str, only: str = "") -> None:
        """Record what was printed, with the folder and the machine under plain names."""
        text = output.replace(str(self.folder), "/home/you").replace(socket.gethostname(), "node-1")
        found = [line.rstrip() for line in text.splitlines()]
        hint = "to see whether resuming is exact"
        self.lines += [line for line in found if re.search(only, line) and hint not in line]


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *descendants(child))]


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a command and all that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def recovery(stage: Stage) -> None:
    """A kill, the next start, and the list of checkpoints."""
    stage.train_and_kill(80, 200)
    stage.run("python train.py plain 200")
    stage.run("holdfast ls runs/gpt --all")


def damage(stage: Stage) -> None:
    """One flipped byte in the newest checkpoint: found, named and skipped."""
    stage.run("python train.py plain 100", only="^$")
    newest = max(stage.home.glob("step-*/*.safetensors"))
    with newest.open("r+b") as file:
        file.seek(50_000)
        byte = file.read(1)
        file.seek(50_000)
        file.write(bytes([byte[0] ^ 0xFF]))
    stage.lines = [f"(one byte of {newest.relative_to(stage.folder)} is flipped)"]
    stage.run("holdfast verify runs/gpt", status=1)
    stage.run("python train.py plain 120")
    stage.run("holdfast ls runs/gpt --all")
    stage.run("holdfast verify runs/gpt --all", status=1)


def hang(stage: Stage) -> None:
    """A data loader of one of two ranks that waits for ever."""
    command = "torchrun --standalone --nproc-per-node 2 train.py hang 100000"
    stage.run_until(command, "Nothing was done", only="^holdfast|^  ")
    stage.run("holdfast stacks runs/gpt --recorded")


def slow(stage: Stage) -> None:
    """A disk that is slow for one of two ranks."""
    command = "torchrun --standalone --nproc-per-node 2 train.py slow 100000"
    stage.run_until(command, "Nothing was done", only="^holdfast|^  ")
    stage.run("holdfast history runs/gpt --event slow-rank")


def spike(stage: Stage) -> None:
    """A bad stretch in the data, and the way back."""
    stage.run("python train.py spike 300")
    stage.run("holdfast ls runs/gpt")
    stage.run("holdfast history runs/gpt --event spike --event rollback --event unhealthy")


def report(stage: Stage) -> None:
    """The figures of a run that was killed twice, and its page."""
    stage.train_and_kill(100, 400)
    stage.train_and_kill(240, 400)
    stage.lines.clear()
    stage.run("python train.py plain 400", only="^$")
    stage.lines.clear()
    stage.run("holdfast report runs/gpt")
    stage.run("holdfast report runs/gpt -o report.html", only="^$")
    photograph(
        (stage.folder / "report.html").as_uri(), "gallery-report", "return !!document.querySelector('svg')"
    )


def dash(stage: Stage) -> None:
    """A job that was preempted, on the page of jobs."""
    stage.run("holdfast launch --name gpt -- python train.py plain 400", only="^$")
    while not list(stage.folder.glob("state/jobs/1/**/runs/gpt/step-*/*manifest*.json")):
        time.sleep(0.2)
    stage.run("holdfast preempt 1", only="^$")
    stage.run("holdfast wait 1", only="^$")
    stage.lines.clear()
    stage.run("holdfast queue --all")
    server = stage.start("holdfast dash --no-browser")
    try:
        assert server.stdout is not None
        url = next(line.strip() for line in server.stdout if line.startswith("http://"))
        photograph(url, "gallery-dash", "return document.body.innerText.includes('gpt')", job="1")
    finally:
        kill(server)


def photograph(url: str, name: str, ready: str, *, job: str = "") -> None:
    """Have the browser draw a page into NAME.png, and for a phone into NAME-phone.png."""
    tests = HERE.parents[1] / "tests"  # instead of this folder, which has a module `report` too
    sys.path[:] = [str(tests), str(tests / "dash"), *(one for one in sys.path if Path(one) != HERE)]
    from driver import browsing  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="holdfast-browser-") as profile, browsing(Path(profile)) as page:
        for suffix, width, height in (("", 1280, 800), ("-phone", 390, 844)):
            page.size(width, height)
            page.open(url)
            page.wait(ready)
            if job:
                page.run("location.hash = arguments[0]", f"#/jobs/{job}")
                page.wait("return !!document.querySelector('svg, canvas')")
            time.sleep(3)  # charts move into their place
            image = page.cdp("Page.captureScreenshot", format="png")["data"]
            (HERE / f"{name}{suffix}.png").write_bytes(base64.b64decode(image))


SCENES: dict[str, Callable[[Stage], None]] = {
    one.__name__: one for one in (recovery, damage, hang, slow, spike, report, dash)
}


def main() -> None:
    """Run the scenes, and write each into the page as soon as it has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenes", nargs="*", help="default: all")
    for name in parser.parse_args().scenes or SCENES:
        with tempfile.TemporaryDirectory(prefix="holdfast-gallery-") as folder:
            stage = Stage(Path(folder).resolve())
            SCENES[name](stage)
            PAGE.write_text(with_scene(PAGE.read_text(), name, stage.lines))
        sys.stderr.write(f"{name}: {len(stage.lines)} lines\n")


def with_scene(text: str, name: str, lines: list[str]) -> str:
    """Return the page with another output of a scene."""
    begin, end = f"<!-- scene {name} -->\n", f"<!-- /scene {name} -->"
    head, found, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    if not found:
        raise ValueError(f"{PAGE} has no scene {name}")
    return f"{head}{begin}```console\n" + "\n".join(lines) + f"\n```\n{end}{tail}"


if __name__ == "__main__":
    main()
