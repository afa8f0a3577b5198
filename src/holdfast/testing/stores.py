"""The store contract as tests: what every implementation of `holdfast.store.Store` must pass."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, Unsupported
from holdfast.store.contract import Entry, Store

BLOCK_BYTES = 4096
SLICE_BYTES = 16 << 20
BAD_NAMES = ("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "a/./b", "a\0b", "x" * 256)
NUM_THREADS = 8
NUM_ROUNDS = 20


class StoreSuite:
    """Subclass in a test module and give a pytest fixture `store`: an empty store, a new one for each test.

    Example:
        >>> class TestMyStore(StoreSuite):
        ...     @pytest.fixture
        ...     def store(self, tmp_path):
        ...         return MyStore(tmp_path)
    """

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, "mmap"])
    def test_what_was_put_comes_back(self, store: Store, kind: Any) -> None:
        """`put` then `get` and `read_into` give the same bytes, however few and whoever holds them."""
        edges = (0, 1, 100, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 7)
        for num_bytes in (*edges, (1 << 20) - 1, (1 << 20) + 1):
            self.check_round_trip(store, num_bytes, kind)

    @pytest.mark.parametrize("num_bytes", [SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + BLOCK_BYTES + 1])
    def test_what_was_put_from_an_arena_comes_back(self, store: Store, num_bytes: int) -> None:
        """The same for objects that are written and read in several slices from aligned memory."""
        self.check_round_trip(store, num_bytes, "mmap")

    def check_round_trip(self, store: Store, num_bytes: int, kind: Any) -> None:
        """Put, get and read one object, with every way to hold its bytes."""
        data = _pattern(num_bytes)
        store.put("a/object", _held_by(kind, data))
        assert store.get("a/object") == data
        assert store.size("a/object") == num_bytes
        target = _aligned(num_bytes)
        store.read_into("a/object", 0, target)
        assert target == data

    def test_the_store_keeps_its_own_copy(self, store: Store) -> None:
        """Changing the buffer after `put` has returned does not change the object."""
        data = bytearray(_pattern(2 * BLOCK_BYTES))
        store.put("a", data)
        data[:] = bytes(len(data))
        assert store.get("a") == _pattern(2 * BLOCK_BYTES)

    @pytest.mark.parametrize("sizes", [[], [0], [5], [1, 0, BLOCK_BYTES], [BLOCK_BYTES + 1, 1 << 20, 3]])
    def test_parts_become_one_object(self, store: Store, sizes: list[int]) -> None:
        """`put_parts` puts together what is made piece by piece, in memory that is used again."""
        whole = _pattern(sum(sizes))
        room = bytearray(max(sizes, default=0))

        def parts() -> Iterator[memoryview]:
            at = 0
            for size in sizes:
                room[:size] = whole[at : at + size]
                at += size
                yield memoryview(room)[:size]

        store.put_parts("a/object", parts(), len(whole))
        assert store.get("a/object") == whole
        assert list(store.list()) == [Entry("a/object", len(whole))]

    def test_parts_that_fail_leave_nothing(self, store: Store) -> None:
        """What the maker of the parts raises is raised, and the name is as it was before."""
        store.put("old", b"old")

        def parts() -> Iterator[bytes]:
            yield b"x" * BLOCK_BYTES
            message = "the source is damaged"
            raise Corrupt(message)

        for name in ("old", "new"):
            with pytest.raises(Corrupt, match="the source"):
                store.put_parts(name, parts(), 2 * BLOCK_BYTES)
        for found in (1, 3):
            with pytest.raises(InvalidInput, match="new"):
                store.put_parts("new", [b"y"] * found, 2)
        assert store.get("old") == b"old"
        assert list(store.list()) == [Entry("old", 3)]

    def test_parts_leave_a_taken_name_alone(self, store: Store) -> None:
        """`put_parts(if_absent=True)` keeps what is there; without it, it is replaced."""
        store.put("a", b"first")
        with pytest.raises(Conflict):
            store.put_parts("a", [b"second"], 6, if_absent=True)
        assert store.get("a") == b"first"
        store.put_parts("a", [b"sec", b"ond"], 6)
        assert store.get("a") == b"second"

    def test_names_may_have_parts_and_unusual_characters(self, store: Store) -> None:
        """Several parts, spaces, dots, non-ASCII letters, 255 bytes in a part: all are taken as they are."""
        names = ["a", "b/c", "b/d/e.f", "with space/é%20?#*", ".hidden", "..x/y..", "n" * 255]
        for name in names:
            store.put(name, name.encode())
        assert {entry.name for entry in store.list()} == set(names)
        assert all(store.get(name) == name.encode() for name in names)

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_names_are_refused(self, store: Store, name: str) -> None:
        """Every method that takes a name refuses one that is empty, absolute or climbs."""
        calls: list[Callable[[], Any]] = [
            lambda: store.put(name, b"x"),
            lambda: store.put(name, b"x", if_absent=True),
            lambda: store.put_parts(name, [b"x"], 1),
            lambda: store.get(name),
            lambda: store.read_into(name, 0, memoryview(bytearray(1))),
            lambda: store.lend(name, 0, 1),
            lambda: store.append(name, b"x"),
            lambda: store.size(name),
            lambda: store.delete(name),
        ]
        for call in calls:
            with pytest.raises(InvalidInput):
                call()
        assert list(store.list()) == []

    @pytest.mark.parametrize("prefix", ["/", "/a", "../", "../a", "a//", "a/../b", "./a"])
    def test_prefixes_that_no_name_has_are_refused(self, store: Store, prefix: str) -> None:
        """`list` and `sweep` refuse a prefix that climbs out of the store."""
        with pytest.raises(InvalidInput):
            list(store.list(prefix))
        with pytest.raises(InvalidInput):
            store.sweep(prefix)

    def test_a_missing_object_is_not_found(self, store: Store) -> None:
        """`get` and `read_into` raise NotFound, `size` says None."""
        store.put("there/object", b"x")
        for name in ("missing", "there/missing", "missing/object", "there", "there/object/below"):
            with pytest.raises(NotFound):
                store.get(name)
            with pytest.raises(FileNotFoundError):
                store.read_into(name, 0, memoryview(bytearray(1)))
            assert store.size(name) is None

    @pytest.mark.parametrize("num_bytes", [10, 3 * BLOCK_BYTES + 5, (1 << 20) + 3])
    def test_any_range_can_be_read(self, store: Store, num_bytes: int) -> None:
        """`read_into` fills the buffer from odd and even offsets, into aligned and unaligned memory."""
        data = _pattern(num_bytes)
        store.put("a", data)
        chance = random.Random(num_bytes)
        edges = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, num_bytes - 1, num_bytes]
        edges = sorted(
            {edge for edge in edges if edge <= num_bytes} | {chance.randrange(num_bytes) for _ in "12345"}
        )
        ranges = [(start, stop) for start in edges for stop in edges if start <= stop]
        assert len(ranges) > 20
        for start, stop in ranges:
            for shift in (0, 1):
                room = _aligned(stop - start + shift)[shift:]
                store.read_into("a", start, room)
                assert room == data[start:stop], (start, stop, shift)

    def test_lent_bytes_are_those_of_the_range(self, store: Store) -> None:
        """`lend` gives what `read_into` would have, read-only and without waiting for a buffer."""
        data = _pattern(3 * BLOCK_BYTES + 5)
        store.put("a", data)
        for start, stop in ((0, len(data)), (1, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES), (5, 6)):
            lent = store.lend("a", start, stop - start)
            assert lent == data[start:stop]
            assert lent.readonly
        with pytest.raises(NotFound):
            store.lend("missing", 0, 1)

    def test_flush_and_close_lose_nothing(self, store: Store) -> None:
        """After `close` the store can be used again; `check` and `flush` change nothing that was put."""
        store.check()
        store.append("log", b"one\n")
        store.flush()
        store.put("a", b"x")
        store.close()
        store.append("log", b"two\n")
        assert store.get("log") == b"one\ntwo\n"
        assert sorted(entry.name for entry in store.list()) == ["a", "log"]

    @pytest.mark.parametrize("num_bytes", [0, 10, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
    def test_a_read_past_the_end_is_corrupt(self, store: Store, num_bytes: int) -> None:
        """`read_into` that cannot fill its buffer raises Corrupt and names the object."""
        store.put("the-object", _pattern(num_bytes))
        wanted = [
            (0, num_bytes + 1),
            (num_bytes, 1),
            (num_bytes + BLOCK_BYTES, 1),
            (0, num_bytes + 2 * BLOCK_BYTES),
        ]
        wanted += [(0, 8 * BLOCK_BYTES), (BLOCK_BYTES, 4 * BLOCK_BYTES)]
        for offset, length in wanted:
            with pytest.raises(Corrupt, match="the-object"):
                store.read_into("the-object", offset, _aligned(length))
            with pytest.raises(Corrupt, match="the-object"):
                store.lend("the-object", offset, length)

    @pytest.mark.parametrize("num_bytes", [3, 2 << 20])
    def test_put_replaces_an_object_by_a_shorter_and_a_longer_one(self, store: Store, num_bytes: int) -> None:
        """Nothing of the old object shines through."""
        for length in (num_bytes, num_bytes - 1, num_bytes + 1, 0):
            store.put("a", _pattern(length, seed=length))
            assert store.get("a") == _pattern(length, seed=length)
            assert list(store.list()) == [Entry("a", length)]

    @pytest.mark.parametrize("num_bytes", [5000, (1 << 20) + 5])
    def test_readers_see_the_old_or_the_new_object(self, store: Store, num_bytes: int) -> None:
        """While an object is replaced, reads and listings see one whole object, never a mix, never none."""
        store.put("d/a", b"0" * num_bytes)
        finished = threading.Event()

        def replace() -> None:
            try:
                for number in range(NUM_ROUNDS):
                    store.put("d/a", b"%d" % (number % 10) * (num_bytes + number % 2))
            finally:
                finished.set()

        def read() -> int:
            num_reads = 0
            while not num_reads or not finished.is_set():
                data, room = store.get("d/a"), _aligned(num_bytes)
                store.read_into("d/a", 0, room)
                for found in (data, bytes(room)):
                    assert found == found[:1] * len(found)
                assert len(data) in (num_bytes, num_bytes + 1)
                assert [e.num_bytes - num_bytes in (0, 1) for e in store.list("d/")] == [True]
                num_reads += 1
            return num_reads

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            pool.submit(replace).result()
            assert all(reader.result() > 0 for reader in readers)

    def test_if_absent_leaves_an_object_alone(self, store: Store) -> None:
        """`put(if_absent=True)` on a taken name raises Conflict, and makes a name that is free."""
        store.put("a", b"first", if_absent=True)
        with pytest.raises(Conflict):
            store.put("a", b"second", if_absent=True)
        assert store.get("a") == b"first"
        store.delete("a")
        store.put("a", b"third", if_absent=True)
        assert store.get("a") == b"third"

    @pytest.mark.parametrize("num_bytes", [10, (1 << 20) + 1])
    def test_one_of_many_wins_a_free_name(self, store: Store, num_bytes: int) -> None:
        """Of threads that race for a name with `if_absent`, one wins, and the object is the winner's."""
        for turn in range(5):
            name, start = f"race/{turn}", threading.Barrier(NUM_THREADS)

            def claim(number: int, name: str = name, start: threading.Barrier = start) -> bool:
                start.wait()
                try:
                    store.put(name, b"%d" % number * num_bytes, if_absent=True)
                except Conflict:
                    return False
                return True

            with ThreadPoolExecutor(NUM_THREADS) as pool:
                won = list(pool.map(claim, range(NUM_THREADS)))
            assert won.count(True) == 1
            assert store.get(name) == b"%d" % won.index(True) * num_bytes
        assert len(list(store.list())) == 5

    def test_a_link_is_the_same_bytes_under_another_name(self, store: Store) -> None:
        """It replaces what stood there, and deleting the source leaves it whole."""
        store.put("a/one", b"first")
        store.put("b/two", b"something else")
        try:
            store.link("a/one", "b/two")
            store.link("a/one", "b/two")
            store.link("a/one", "c/three")
        except Unsupported:
            assert store.get("b/two") == b"something else"
            return
        store.delete("a/one")
        assert store.get("b/two") == store.get("c/three") == b"first"
        assert sorted(entry.name for entry in store.list()) == ["b/two", "c/three"]

    def test_a_link_to_nothing_is_not_found(self, store: Store) -> None:
        """And leaves what stood there alone."""
        store.put("b", b"old")
        with pytest.raises((NotFound, Unsupported)):
            store.link("missing", "b")
        assert store.get("b") == b"old"

    def test_list_gives_names_and_sizes_by_prefix(self, store: Store) -> None:
        """`list` gives every object whose name starts with the prefix, which may end in mid-part."""
        names = ["run.json", "step-01/a", "step-01/b/c", "step-010/a", "step-02/a", "steps"]
        for length, name in enumerate(names):
            store.put(name, b"x" * length)
        for prefix in (
            "",
            "s",
            "step-0",
            "step-01",
            "step-01/",
            "step-01/b",
            "step-01/b/c",
            "steps",
            "zz",
            "step-01/a/",
        ):
            expected = [Entry(name, length) for length, name in enumerate(names) if name.startswith(prefix)]
            assert sorted(store.list(prefix), key=lambda e: e.name) == sorted(
                expected, key=lambda e: e.name
            ), prefix

    def test_an_unused_store_is_empty(self, store: Store) -> None:
        """Looking into a store that was never written raises nothing."""
        assert list(store.list()) == []
        assert list(store.list("a/b")) == []
        assert store.size("a") is None
        store.delete("a/b")
        store.sweep()

    def test_an_unfinished_put_is_never_listed(self, store: Store) -> None:
        """While objects are being written, listings show only whole ones, and only names that were given."""
        num_bytes, finished = (1 << 20) + 5, threading.Event()
        data = _pattern(num_bytes)

        def write() -> None:
            try:
                for number in range(NUM_ROUNDS):
                    store.put(f"d/{number}", data, if_absent=number % 2 == 0)
            finally:
                finished.set()

        with ThreadPoolExecutor(1) as pool:
            writing, seen = pool.submit(write), set()
            while not finished.is_set():
                seen |= {entry for entry in store.list() if int(entry.name[2:]) in range(NUM_ROUNDS)}
            writing.result()
        assert {entry.num_bytes for entry in seen} <= {num_bytes}
        assert set(store.list()) == {Entry(f"d/{number}", num_bytes) for number in range(NUM_ROUNDS)}

    def test_append_adds_at_the_end(self, store: Store) -> None:
        """`append` makes a log and adds to it; it is read and listed like any object."""
        lines = [b"line %d\n" % number for number in range(100)]
        for line in lines:
            store.append("history/log", line)
        assert store.get("history/log") == b"".join(lines)
        assert list(store.list("history/")) == [Entry("history/log", len(b"".join(lines)))]

    def test_delete_removes_one_object(self, store: Store) -> None:
        """`delete` removes the object and nothing else, and does not mind when there is none."""
        for name in ("d/a", "d/ab", "d/e/f"):
            store.put(name, b"x")
        store.delete("d/a")
        store.delete("d/a")
        store.delete("never/was")
        assert store.size("d/a") is None
        assert {entry.name for entry in store.list()} == {"d/ab", "d/e/f"}

    def test_delete_does_not_remove_what_is_below_a_name(self, store: Store) -> None:
        """The name of a "directory" names no object."""
        store.put("d/a", b"x")
        store.delete("d")
        store.delete("d/a/b")
        assert store.get("d/a") == b"x"

    def test_deleted_places_can_be_used_again(self, store: Store) -> None:
        """After all objects of a "directory" are gone, new ones can be put there."""
        for _ in range(3):
            store.put("d/e/a", b"x")
            store.delete("d/e/a")
        store.put("d/e/a", b"y")
        assert store.get("d/e/a") == b"y"

    def test_put_and_delete_of_neighbours_do_not_disturb_each_other(self, store: Store) -> None:
        """Threads that put and delete different names in one "directory" never fail."""

        def work(number: int) -> None:
            for turn in range(NUM_ROUNDS):
                store.put(f"d/e/{number}", b"%d" % turn, if_absent=turn % 2 == 0)
                assert store.get(f"d/e/{number}") == b"%d" % turn
                store.delete(f"d/e/{number}")

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(work, range(NUM_THREADS)))
        assert list(store.list()) == []

    def test_many_threads_put_different_names(self, store: Store) -> None:
        """Concurrent puts to different names all arrive."""

        def work(number: int) -> None:
            store.put(f"d{number % 3}/{number}", _pattern(number * 1000, seed=number))

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(work, range(50)))
        for number in range(50):
            assert store.get(f"d{number % 3}/{number}") == _pattern(number * 1000, seed=number)
        assert len(list(store.list())) == 50

    def test_sweep_leaves_finished_objects(self, store: Store) -> None:
        """`sweep` touches no object, with and without a prefix."""
        for name in ("a", "d/a", "d/e/a"):
            store.put(name, b"x")
        for prefix in ("", "d/", "d", "nothing"):
            store.sweep(prefix)
        assert {entry.name for entry in store.list()} == {"a", "d/a", "d/e/a"}

    def test_sweep_leaves_puts_that_are_going_on(self, store: Store) -> None:
        """Puts finish although another thread sweeps all the time."""
        finished = threading.Event()

        def write() -> None:
            try:
                for number in range(NUM_ROUNDS):
                    store.put(f"d{number}/a", b"x" * 5000, if_absent=number % 2 == 0)
            finally:
                finished.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not finished.is_set():
                store.sweep()
            writing.result()
        assert len(list(store.list())) == NUM_ROUNDS

    def test_the_store_says_what_it_is(self, store: Store) -> None:
        """`url` and `properties` are there before any object is."""
        assert isinstance(store.url, str)
        assert store.url
        assert store.properties.read_align_bytes >= 1
        assert store.properties.survives_host in (True, False)


def _pattern(num_bytes: int, *, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def _aligned(num_bytes: int) -> memoryview:
    """Zeroed memory that begins at a page."""
    return memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]


def _held_by(kind: Any, data: bytes) -> Any:
    if kind != "mmap":
        return kind(data)
    held = _aligned(len(data))
    held[:] = data
    return held
