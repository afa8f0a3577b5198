"""Exactness of a method's checkpoints: what comes back, a change during the save, and a damaged byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagecache import files_under
from peers.contract import Peer
from states import Subject

EXACT = "exact"
Digests = dict[str, str]


def check(kind: type[Peer], subject: Subject, directory: Path) -> dict[str, str]:
    """Return `back`, `during` and `damaged`, each as a few words; a failure is an outcome, too.

    `back`: everything that a load brings back is compared with the state at its save.
    `during`: the same, but the state changes as soon as the method allows it, while the save goes on.
    `damaged`: the lowest bit of the byte in the middle of the largest file is changed before a load.
    """
    found = {"back": _outcome(lambda: _save_and_load(kind, subject, directory / "back", is_changed=False))}
    if found["back"] != EXACT:
        return found
    found["during"] = _outcome(lambda: _save_and_load(kind, subject, directory / "during", is_changed=True))
    found["damaged"] = _outcome(lambda: _load_damaged(kind, subject, directory / "back"))
    return found


def _outcome(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except Exception as error:  # noqa: BLE001 - any failure of a method is what is reported
        return failure(error)


def failure(error: BaseException) -> str:
    """Return an error in one short line."""
    lines = str(error).strip().splitlines() or ["without a message"]
    return f"failed: {type(error).__name__}: {lines[0][:160]}"


def _save_and_load(kind: type[Peer], subject: Subject, directory: Path, *, is_changed: bool) -> str:
    directory.mkdir(parents=True)
    subject.change()
    peer = kind(subject, directory)
    peer.open()
    peer.prepare()
    expected = subject.digests()
    pending = peer.save(1)
    pending.wait_staged()
    if is_changed:
        with peer.guard():
            subject.change()
    later = subject.digests()
    pending.wait_complete()
    peer.settle()
    peer.close()
    return compare(expected, load(kind, subject, directory, 1), later)


def _load_damaged(kind: type[Peer], subject: Subject, directory: Path) -> str:
    """Load again what was saved last in a directory, with one bit changed; the state is as at the save."""
    expected = load(kind, subject, directory, 1)
    file = max(files_under(directory), key=lambda path: path.stat().st_size)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))
    try:
        found = load(kind, subject, directory, 1)
    except Exception as error:  # noqa: BLE001 - a refusal of any kind is what is asked for
        return f"found: {type(error).__name__}"
    return "had no effect" if found == expected else "not found"


def load(kind: type[Peer], subject: Subject, directory: Path, step: int) -> Digests:
    """Load with a new object of the method into an overwritten state, and return the tensors' hashes."""
    peer = kind(subject, directory)
    peer.open()
    try:
        subject.scramble()
        peer.load(step)
        return subject.digests()
    finally:
        peer.close()


def compare(expected: Digests, found: Digests, later: Digests) -> str:
    """Return `EXACT`, or how many tensors differ, and how many of them have the later values."""
    wrong = [name for name, digest in expected.items() if found.get(name) != digest]
    if not wrong:
        return EXACT
    text = f"wrong: {len(wrong)} of {len(expected)} tensors differ"
    newer = sum(found.get(name) == later[name] != expected[name] for name in wrong)
    return f"{text}, {newer} have values of after the save" if newer else text
