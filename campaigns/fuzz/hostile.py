"""Hostile homes: each object replaced by what is no whole file, under each command that reads homes."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.fuzz.bounded import TIME_LIMIT_S, WARM_UP_S, Failure, run_case

SECRET = b"export TOKEN=not-for-you\n"
_NAMES = 20_000  # a directory of more than a megabyte
_LEVELS = 1_500
_READER = 65531  # a user without any rights
STRANGE = (b"a\nb", b"\x1b[2J\x1b]0;owned\x07", b"\xff\xfe", "\u202egpj".encode(), b"\x9b31m", b" ", b"-rf")
_CONTROLS = frozenset("\x1b\x07\x9b\x85\u202e\r\x00")

# -- kinds -------------------------------------------------------------------------------------------------


def _replace(make: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
    def act(path: Path, outside: Path) -> object:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return make(path, outside)

    return act


def _socket(path: Path, _: Path) -> object:
    listener = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(path.parent)  # an address has at most 107 bytes
    try:
        listener.bind(path.name)
    finally:
        os.chdir(here)
    return listener


def _sparse(path: Path, _: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _grow(path: Path, _: Path) -> object:
    """Append to a file until the returned event is set."""
    ended = threading.Event()

    def append() -> None:
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
            while not ended.wait(0.0005) and file.tell() < 64 << 20:
                file.write(b" " * 4096)

    threading.Thread(target=append, daemon=True).start()
    return ended


def _strange_names(path: Path, _: Path) -> None:
    folder = path if path.is_dir() else path.parent
    for name in map(os.fsdecode, STRANGE):
        (folder / name).write_bytes(b"x")
        (folder / f"{name}.d").mkdir()
        (folder / f"{name}.d" / "step-00000077").write_bytes(b"x")


def _many_names(path: Path, _: Path) -> None:
    folder = path if path.is_dir() else path.parent
    for i in range(_NAMES):
        os.close(os.open(folder / f"rank-{i:05}-a0009.json", os.O_CREAT | os.O_WRONLY))


def _deep(path: Path, _: Path) -> None:
    """Make folders in each other, deeper than a path may be long."""
    here = os.open(path if path.is_dir() else path.parent, os.O_RDONLY)
    for _level in range(_LEVELS):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("manifest-a0009.json", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "FIFO": _replace(lambda path, outside: os.mkfifo(path)),
    "link": _replace(lambda path, outside: path.symlink_to(outside / "bashrc")),
    "link to a folder": _replace(lambda path, outside: path.symlink_to(outside)),
    "link to nothing": _replace(lambda path, outside: path.symlink_to(outside / "made")),
    "link to itself": _replace(lambda path, outside: path.symlink_to(path.name)),
    "link to a device": _replace(lambda path, outside: path.symlink_to("/dev/zero")),
    "socket": _replace(_socket),
    "directory": _replace(lambda path, outside: path.mkdir()),
    "empty": _replace(lambda path, outside: path.write_bytes(b"")),
    "zeros": _replace(lambda path, outside: path.write_bytes(bytes(1 << 20))),
    "sparse terabyte": _replace(_sparse),
    "unreadable": lambda path, outside: path.chmod(0),
    "growing": lambda path, outside: None if path.is_dir() else _grow(path, outside),
    "strange names": _strange_names,
    "many names": _many_names,
    "deep folders": _deep,
}
"""Kinds of replacements; each gets the path of an object and a folder that must stay as it is."""

# -- commands ----------------------------------------------------------------------------------------------


def _command(*words: str) -> Callable[[Path], str]:
    def act(home: Path) -> str:
        from holdfast import cli

        out = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            contextlib.suppress(SystemExit),
        ):
            cli.main([word.replace("HOME", str(home)) for word in words])
        return out.getvalue()

    return act


def _restore(home: Path) -> str:
    import torch

    from holdfast import Checkpointer, Reads
    from holdfast.errors import HoldfastError, printable

    try:
        with Checkpointer(
            home, {"model": {"w": torch.zeros(16)}}, quiet=True, reads=Reads(patience=0)
        ) as ckpt:
            ckpt.restore()
    except HoldfastError as error:
        return printable(str(error))
    return ""


def _read(home: Path) -> str:
    import holdfast
    from holdfast.errors import HoldfastError, printable

    try:
        checkpoint = holdfast.open(home)
        for name in list(checkpoint):
            checkpoint[name]
    except HoldfastError as error:
        return printable(str(error))
    return ""


COMMANDS: dict[str, Callable[[Path], str]] = {
    "ls": _command("ls", "HOME", "--all"),
    "ls --json": _command("ls", "HOME", "--all", "--json"),
    "ls --local": _command("ls", "HOME", "--local", "HOME"),
    "show": _command("show", "HOME"),
    "show --step": _command("show", "HOME", "--step", "10", "--json"),
    "verify": _command("verify", "HOME", "--all"),
    "diff": _command("diff", "HOME@10", "HOME"),
    "export": _command("export", "HOME", "HOME.out.safetensors", "--overwrite"),
    "export --to dcp": _command("export", "HOME", "HOME.dcp", "--to", "dcp", "--overwrite"),
    "export --to torch": _command("export", "HOME", "HOME.pt", "--to", "torch", "--overwrite"),
    "history": _command("history", "HOME"),
    "history --json": _command("history", "HOME", "--lost", "--json"),
    "report": _command("report", "HOME", "-o", "HOME.html"),
    "rm": _command("rm", "HOME", "--step", "10", "--yes"),
    "rm --incomplete": _command("rm", "HOME", "--incomplete", "--superseded", "--yes"),
    "import": _command("import", "HOME", "HOME.imported"),
    "drain": _command("drain", "HOME", "--status"),
    "trust": _command("trust", "HOME", "--remove"),
    "restore": _restore,
    "open": _read,
}
"""Everything that reads a home; returns what reached the terminal."""

# -- cases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One object of a home replaced by one kind, under one command."""

    command: str
    object: str
    kind: str


def objects(home: dict[str, bytes]) -> list[str]:
    """Return the names that are replaced: of objects, and of the folders that hold them; "." is the home."""
    wanted = (
        *("holdfast.json", "done.json", "attempts/a0002.json", "history/a0001-rank-00000.jsonl"),
        *("step-00000030/manifest-a0002.json", "step-00000030/rank-00000-a0002.json"),
        *("step-00000030/rank-00000-a0002.safetensors", "step-00000010/manifest-a0001.json"),
        *("step-00000020/passed-a0002.json", "attempts/a0002-saved.json"),
    )
    return [
        *(name for name in wanted if name in home),
        *("attempts", "history", "step-00000030", "."),
    ]


def run(case: Case, home: dict[str, bytes], *, processor_s: float = TIME_LIMIT_S) -> Failure | None:
    """Return what was wrong: an error that is not ours, a hang, a write outside or a raw escape."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-hostile-"))
    held: object = None
    try:
        outside = place / "outside"
        outside.mkdir()
        (outside / "bashrc").write_bytes(SECRET)
        for name, content in home.items():
            path = place / "home" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        held = KINDS[case.kind](place / "home" / case.object, outside)
        before = _snapshot(outside)
        said: list[str] = []
        with _reader(place, case.kind):
            failure = run_case(
                lambda: said.append(COMMANDS[case.command](place / "home")), processor_s=processor_s
            )
        if failure is None:
            failure = _wrong(said[-1] if said else "", _snapshot(outside) != before)
        return failure
    finally:
        if isinstance(held, threading.Event):
            held.set()
        elif isinstance(held, socket.socket):
            held.close()
        _remove(place)


@contextlib.contextmanager
def _reader(place: Path, kind: str) -> Iterator[None]:
    """Act as another user where the case is about permissions, which root has all of."""
    if kind != "unreadable" or os.geteuid() != 0:
        yield
        return
    for path in (place, *place.rglob("*")):
        os.chown(path, _READER, _READER, follow_symlinks=False)
    os.setegid(_READER)
    os.seteuid(_READER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def _remove(place: Path) -> None:
    """Remove a tree that may be deeper than a path can be long."""
    for path in place.rglob("deep"):
        subprocess.run(["rm", "-rf", path], check=False)  # rm descends without whole paths
        break
    shutil.rmtree(place, ignore_errors=True)


def _wrong(said: str, was_written: bool) -> Failure | None:
    if was_written:
        return Failure("write outside", "", said)
    if "Traceback" in said or "internal error" in said.lower():
        return Failure("traceback", "", said[-3000:])
    if SECRET.decode().strip() in said or "TOKEN" in said:
        return Failure("read outside", "", said[-3000:])
    found = _CONTROLS & set(said)
    return Failure("escape", repr(sorted(found)), repr(said[-3000:])) if found else None


def _snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in sorted(folder.iterdir())}


def matrix(home: dict[str, bytes]) -> Iterator[Case]:
    """Yield every case. Kinds that are about a whole folder are made in the folders only."""
    for name in objects(home):
        for kind in KINDS:
            is_folder = name == "." or name not in home
            if kind in ("strange names", "many names", "deep folders") and not is_folder:
                continue
            if kind in ("zeros", "growing") and is_folder:
                continue
            for command in COMMANDS:
                yield Case(command, name, kind)


def warm_up(home: dict[str, bytes]) -> None:
    """Run every command once: imports and caches are no part of a case."""
    for command in COMMANDS:
        run(Case(command, "done.json", "empty"), home, processor_s=WARM_UP_S)


def main() -> int:
    """Run the whole matrix; return 1 if anything failed."""
    from campaigns.fuzz.targets import home_documents

    home: dict[str, Any] = home_documents()
    warm_up(home)
    num_cases = num_failures = 0
    chosen = sys.argv[1:]
    for case in matrix(home):
        if chosen and case.kind not in chosen and case.command not in chosen and case.object not in chosen:
            continue
        num_cases += 1
        failure = run(case, home)
        if failure is not None:
            num_failures += 1
            print(case, failure.kind, failure.place, failure.text[-1500:], sep="\n  ", flush=True)
    print(f"{num_cases} cases, {num_failures} failures")
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    raise SystemExit(main())
