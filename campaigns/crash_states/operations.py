"""Operations of a recorded workload on a folder: what each changed, and when the change became durable."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.crash_states.trace import Call

MARK = b"mark "
"""A write to /dev/null that begins with this is a mark: a promise that the workload was given."""
NEVER = 1 << 60
ROOT = 0
"""Number of the recorded folder itself, which was there before."""
_FD = re.compile(r"(-?\d+|AT_FDCWD)<([^>]*)>")
_NUMBERS = re.compile(r"-?\d+")


@dataclass(slots=True)
class EntryChange:
    """A change of directory entries, which a crash keeps or loses as a whole."""

    began: int
    ended: int
    slots: tuple[tuple[int, str, int | None], ...]  # directory, name, and the file that it names from then on
    text: str
    durable_at: int = NEVER  # the end of the fsync that covers it


@dataclass(slots=True)
class DataChange:
    """A change of a file's bytes or length."""

    began: int
    ended: int
    offset: int
    data: bytes
    size: int | None = None  # of a truncation: the length from then on
    durable_at: int = NEVER


@dataclass(frozen=True, slots=True)
class Mark:
    """A promise that the workload was given, such as "durable 1 6": attempt 1's step 6 is durable."""

    at: int
    text: str


@dataclass(slots=True)
class Log:
    """All changes of a recorded folder, in order. Files and directories are numbered; 0 is the folder."""

    entries: list[EntryChange] = field(default_factory=list)
    data: dict[int, list[DataChange]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    directories: set[int] = field(default_factory=lambda: {ROOT})
    pipes: set[int] = field(default_factory=set)  # named pipes: what goes through them is not on a disk
    num_calls: int = 0


def read_log(calls: Iterable[Call], root: Path) -> Log:
    """Replay calls on files below `root`, and find out which fsync made each change durable.

    Raises:
        ValueError: a call that the model does not know, or a file that it has not seen.
    """
    replay = _Replay(str(root))
    for call in calls:
        replay.take(call)
    return replay.finish()


def check_complete(log: Log, root: Path) -> None:
    """Compare the end of the log with the real folder: a difference is a call that was missed.

    Raises:
        ValueError: they differ.
    """
    from campaigns.crash_states.states import State, content, tree

    last = State(NEVER - 1, frozenset(range(len(log.entries))), ())
    expected = {path: content(log, last, number) for path, number in tree(log, last).files.items()}
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    paths = expected.keys() | found.keys()
    # SQLite writes its -shm file through a mapping, and makes it anew after a crash.
    different = [path for path in paths if expected.get(path) != found.get(path) and path[-4:] != "-shm"]
    if different:
        raise ValueError(f"the log does not lead to what is in {root}; it differs in {sorted(different)[:5]}")


class _Replay:
    """The folder as it was after each call; fills the log."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.log = Log()
        self.names: dict[int, dict[str, int]] = {ROOT: {}}
        self.bytes: dict[int, bytearray] = {}
        self.last_at: dict[str, int] = {root: ROOT}  # path -> the file that last had it
        self.positions: dict[tuple[str, str], int] = {}  # descriptor and path -> where write() continues
        self.appending: set[tuple[str, str]] = set()
        self.syncs: dict[int, list[tuple[int, int]]] = {}
        self.sync_alls: list[tuple[int, int]] = []
        self.num_files = 0

    def take(self, call: Call) -> None:
        self.log.num_calls += 1
        getattr(self, f"_{call.name.rstrip('0123456789')}", self._unknown)(call)

    def finish(self) -> Log:
        for change in self.log.entries:
            change.durable_at = max(self._synced(folder, change.ended) for folder, _, _ in change.slots)
        for number, changes in self.log.data.items():
            for change in changes:
                change.durable_at = self._synced(number, change.ended)
        return self.log

    def _synced(self, number: int, after: int) -> int:
        """End of the first fsync of a file or directory that was entered after a line."""
        syncs = sorted(self.syncs.get(number, []) + self.sync_alls)
        later = syncs[bisect_left(syncs, (after, 0)) :]
        return min((ended for _, ended in later), default=NEVER)

    # -- paths -----------------------------------------------------------------------------------------------

    def _path(self, call: Call, number: int = 0) -> str | None:
        """Absolute path of the call's path argument of a number; None if it is outside the folder."""
        text = os.fsdecode(call.strings[number])
        if not text.startswith("/"):
            bases = [path for fd, path in _FD.findall(call.arguments.split(" => ")[0])]
            if len(bases) <= number:
                return None  # relative to a current directory that the log does not show: never the folder
            text = os.path.normpath(f"{bases[number]}/{text}")
        return text if text == self.root or text.startswith(f"{self.root}/") else None

    def _slot(self, path: str) -> tuple[int, str]:
        parent, _, name = path.rpartition("/")
        return self._at(parent), name

    def _at(self, path: str) -> int:
        number = self._find(path)
        number = self.last_at.get(path) if number is None else number
        if number is None:
            raise ValueError(f"the log uses {path}, but does not show its making")
        return number

    def _find(self, path: str) -> int | None:
        number = ROOT
        for name in [one for one in path[len(self.root) :].split("/") if one]:
            found = self.names.get(number, {}).get(name)
            if found is None:
                return None
            number = found
        return number

    def _fd(self, call: Call, index: int = 0) -> tuple[str, str] | None:
        """Descriptor and path of the call's descriptor argument; None if it is not below the folder."""
        found = _FD.findall(call.arguments if index else call.arguments[:4500])
        if len(found) <= index:
            return None
        fd, path = found[index]
        path = path.removesuffix(" (deleted)")
        return (fd, path) if path == self.root or path.startswith(f"{self.root}/") else None

    # -- changes ---------------------------------------------------------------------------------------------

    def _change(self, call: Call, *slots: tuple[str, int | None]) -> None:
        found = []
        for path, number in slots:
            folder, name = self._slot(path)
            found.append((folder, name, number))
        for (folder, name, number), (path, _) in zip(found, slots, strict=True):
            if number is None:
                self.names[folder].pop(name, None)
            else:
                self.names[folder][name] = number
                self.last_at[path] = number
        text = f"{call.name} " + " ".join(path[len(self.root) + 1 :] for path, _ in slots)
        self.log.entries.append(EntryChange(call.began, call.ended, tuple(found), text))

    def _new(self, *, is_directory: bool) -> int:
        self.num_files += 1
        if is_directory:
            self.names[self.num_files] = {}
            self.log.directories.add(self.num_files)
        else:
            self.bytes[self.num_files] = bytearray()
            self.log.data[self.num_files] = []
        return self.num_files

    def _put(self, call: Call, number: int, offset: int, data: bytes) -> None:
        there = self.bytes[number]
        if offset > len(there):
            there.extend(bytes(offset - len(there)))
        there[offset : offset + len(data)] = data
        self.log.data[number].append(DataChange(call.began, call.ended, offset, data))

    def _resize(self, call: Call, number: int, size: int) -> None:
        there = self.bytes[number]
        del there[size:]
        there.extend(bytes(size - len(there)))
        self.log.data[number].append(DataChange(call.began, call.ended, 0, b"", size))

    # -- calls, by name --------------------------------------------------------------------------------------

    def _unknown(self, call: Call) -> None:
        raise ValueError(f"line {call.ended}: the model does not know {call.name}({call.arguments[:200]})")

    def _openat(self, call: Call) -> None:
        path = self._path(call)
        flags = call.arguments
        if path is None or path == self.root:
            return
        if "O_TMPFILE" in flags:
            self._unknown(call)
        number = self._find(path)
        if number is None and "O_CREAT" in flags:
            number = self._new(is_directory=False)
            self._change(call, (path, number))
        elif number is not None and "O_TRUNC" in flags and number in self.bytes:
            self._resize(call, number, 0)
        found = _FD.match(call.result)
        if found and number in self.bytes:
            key = found[1], path
            self.positions[key] = 0
            self.appending.discard(key)
            if "O_APPEND" in flags:
                self.appending.add(key)

    _open = _creat = _openat

    def _mkdir(self, call: Call) -> None:
        if path := self._path(call):
            self._change(call, (path, self._new(is_directory=True)))

    _mkdirat = _mkdir

    def _mknod(self, call: Call) -> None:
        if path := self._path(call):
            number = self._new(is_directory=False)
            self.log.pipes.add(number)
            self._change(call, (path, number))

    _mknodat = _mknod

    def _unlink(self, call: Call) -> None:
        if path := self._path(call):
            self._change(call, (path, None))

    _unlinkat = _rmdir = _unlink

    def _rename(self, call: Call) -> None:
        source, target = self._path(call, 0), self._path(call, 1)
        if source is None and target is None:
            return
        if source is None or target is None or "RENAME_EXCHANGE" in call.arguments:
            self._unknown(call)
            return
        number = self._at(source)
        if self._find(target) == number:
            return  # two names of one file: rename does nothing
        self._change(call, (source, None), (target, number))

    _renameat = _rename

    def _link(self, call: Call) -> None:
        source, target = self._path(call, 0), self._path(call, 1)
        if target is not None:
            if source is None:
                self._unknown(call)
                return
            self._change(call, (target, self._at(source)))

    _linkat = _link

    def _symlink(self, call: Call) -> None:
        if self._path(call, 1):
            self._unknown(call)

    _symlinkat = _symlink

    def _write(self, call: Call) -> None:
        found = self._fd(call)
        if found is None:
            if "</dev/null" in call.arguments[:60]:
                data = b"".join(call.strings)
                if data.startswith(MARK):
                    self.log.marks.append(Mark(call.began, data[len(MARK) :].decode().strip()))
            return
        number, data = self._at(found[1]), b"".join(call.strings)[: self._count(call)]
        at = len(self.bytes[number]) if found in self.appending else self.positions.get(found, 0)
        self._put(call, number, at, data)
        self.positions[found] = at + len(data)

    _writev = _write

    def _pwrite(self, call: Call) -> None:
        if found := self._fd(call):
            data = b"".join(call.strings)[: self._count(call)]
            tail = call.arguments.rpartition('"')[2]
            offset = int(_NUMBERS.findall(tail)[-1])
            self._put(call, self._at(found[1]), offset, data)

    _pwritev = _pwrite

    def _count(self, call: Call) -> int:
        """Bytes that a write has written; all of them if its process was killed in it."""
        found = _NUMBERS.match(call.result)
        return int(found[0]) if found else 1 << 40

    def _ftruncate(self, call: Call) -> None:
        if found := self._fd(call):
            self._resize(call, self._at(found[1]), int(_NUMBERS.findall(call.arguments)[-1]))

    def _truncate(self, call: Call) -> None:
        if path := self._path(call):
            self._resize(call, self._at(path), int(_NUMBERS.findall(call.arguments)[-1]))

    def _fallocate(self, call: Call) -> None:
        if found := self._fd(call):
            *_, mode, offset, length = (one.strip() for one in call.arguments.split(","))
            if mode != "0":
                self._unknown(call)
            number = self._at(found[1])
            end = int(offset) + int(length)
            if end > len(self.bytes[number]):
                self._resize(call, number, end)

    def _copy_file_range(self, call: Call) -> None:
        self._copy(call, source=0, target=1)

    def _sendfile(self, call: Call) -> None:
        self._copy(call, source=1, target=0)

    def _copy(self, call: Call, *, source: int, target: int) -> None:
        into, count = self._fd(call, target), self._count(call)
        if into is None or not count:
            return
        fd, path = _FD.findall(call.arguments)[source]
        start = re.search(r"\[(\d+)\]", call.arguments)
        key = fd, path
        at = int(start[1]) if start else self.positions.get(key, 0)
        inside = self._fd(call, source)
        whole = bytes(self.bytes[self._at(path)]) if inside else Path(path).read_bytes()
        data = whole[at : at + count]
        number, to = self._at(into[1]), self.positions.get(into, 0)
        self._put(call, number, to, data)
        self.positions[key], self.positions[into] = at + len(data), to + len(data)

    def _splice(self, call: Call) -> None:
        if self._fd(call, 1):
            self._unknown(call)

    def _fsync(self, call: Call) -> None:
        if (found := self._fd(call)) and call.result.startswith("0"):
            self.syncs.setdefault(self._at(found[1]), []).append((call.began, call.ended))

    _fdatasync = _fsync

    def _sync(self, call: Call) -> None:
        self.sync_alls.append((call.began, call.ended))

    _syncfs = _sync
