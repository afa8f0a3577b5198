"""Conformance tests of the store contract, for every implementation of `holdfast.checkpoint.store.Store`."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.checkpoint.store.contract import ObjectInfo, Store
from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, Unsupported

BLOCK_BYTES = 4096
SLICE_BYTES = 16 << 20
BAD_NAMES = ("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "a/./b", "a\0b", "x" * 256)
NUM_THREADS = 8
NUM_ROUNDS = 20


class StoreSuite:
    """Conformance suite. Subclass it and define a pytest fixture `store` that returns a new, empty store.

    Example:
        >>> class TestMyStore(StoreSuite):
        ...     @pytest.fixture
        ...     def store(self, tmp_path):
        ...         return MyStore(tmp_path)
    """

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, "mmap"])
    def test_an_object_is_read_back_unchanged(self, store: Store, kind: Any) -> None:
        """`get` and `read_into` return what `put` stored, for all sizes and types of buffers."""
        edges = (0, 1, 100, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 7)
        for num_bytes in (*edges, (1 << 20) - 1, (1 << 20) + 1):
            self.check_round_trip(store, num_bytes, kind)

    @pytest.mark.parametrize("num_bytes", [SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + BLOCK_BYTES + 1])
    def test_a_large_object_is_read_back_unchanged(self, store: Store, num_bytes: int) -> None:
        """Large objects, written and read in several slices of aligned memory, round-trip too."""
        self.check_round_trip(store, num_bytes, "mmap")

    def check_round_trip(self, store: Store, num_bytes: int, kind: Any) -> None:
        """Put an object from a buffer of type `kind`, then get and read it."""
        data = _pattern(num_bytes)
        store.put("a/object", _buffer(kind, data))
        assert store.get("a/object") == data
        assert store.size("a/object") == num_bytes
        target = _aligned(num_bytes)
        store.read_into("a/object", 0, target)
        assert target == data

    def test_the_store_copies_what_it_is_given(self, store: Store) -> None:
        """Changing the buffer after `put` has returned does not change the object."""
        data = bytearray(_pattern(2 * BLOCK_BYTES))
        store.put("a", data)
        data[:] = bytes(len(data))
        assert store.get("a") == _pattern(2 * BLOCK_BYTES)

    @pytest.mark.parametrize("sizes", [[], [0], [5], [1, 0, BLOCK_BYTES], [BLOCK_BYTES + 1, 1 << 20, 3]])
    def test_parts_are_joined_into_one_object(self, store: Store, sizes: list[int]) -> None:
        """`put_parts` joins parts that all use the same buffer."""
        whole = _pattern(sum(sizes))
        buffer = bytearray(max(sizes, default=0))

        def parts() -> Iterator[memoryview]:
            at = 0
            for size in sizes:
                buffer[:size] = whole[at : at + size]
                at += size
                yield memoryview(buffer)[:size]

        store.put_parts("a/object", parts(), len(whole))
        assert store.get("a/object") == whole
        assert list(store.list()) == [ObjectInfo("a/object", len(whole))]

    def test_parts_that_fail_leave_nothing(self, store: Store) -> None:
        """An exception from the iterator of parts propagates, and the object does not change."""
        store.put("old", b"old")

        def parts() -> Iterator[bytes]:
            yield b"x" * BLOCK_BYTES
            raise Corrupt("the source is damaged")

        for name in ("old", "new"):
            with pytest.raises(Corrupt, match="the source"):
                store.put_parts(name, parts(), 2 * BLOCK_BYTES)
        for found in (1, 3):
            with pytest.raises(InvalidInput, match="new"):
                store.put_parts("new", [b"y"] * found, 2)
        assert store.get("old") == b"old"
        assert list(store.list()) == [ObjectInfo("old", 3)]

    def test_parts_do_not_replace_an_object_if_absent_is_set(self, store: Store) -> None:
        """`put_parts` keeps an existing object with `if_absent=True`, and replaces it without."""
        store.put("a", b"first")
        with pytest.raises(Conflict):
            store.put_parts("a", [b"second"], 6, if_absent=True)
        assert store.get("a") == b"first"
        store.put_parts("a", [b"sec", b"ond"], 6)
        assert store.get("a") == b"second"

    def test_names_may_have_parts_and_unusual_characters(self, store: Store) -> None:
        """Names may have several parts, spaces, dots, non-ASCII letters and 255 bytes in a part."""
        names = ["a", "b/c", "b/d/e.f", "with space/é%20?#*", ".hidden", "..x/y..", "n" * 255]
        for name in names:
            store.put(name, name.encode())
        assert {entry.name for entry in store.list()} == set(names)
        assert all(store.get(name) == name.encode() for name in names)

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_names_are_refused(self, store: Store, name: str) -> None:
        """Every method with a name rejects one that is empty, absolute or contains `..`."""
        calls: list[Callable[[], Any]] = [
            lambda: store.put(name, b"x"),
            lambda: store.put(name, b"x", if_absent=True),
            lambda: store.put_parts(name, [b"x"], 1),
            lambda: store.get(name),
            lambda: store.read_into(name, 0, memoryview(bytearray(1))),
            lambda: store.read_view(name, 0, 1),
            lambda: store.append(name, b"x"),
            lambda: store.size(name),
            lambda: store.delete(name),
        ]
        for call in calls:
            with pytest.raises(InvalidInput):
                call()
        assert list(store.list()) == []

    @pytest.mark.parametrize("prefix", ["/", "/a", "../", "../a", "a//", "a/../b", "./a"])
    def test_invalid_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        """`list` and `sweep` reject a prefix that cannot begin a valid name."""
        with pytest.raises(InvalidInput):
            list(store.list(prefix))
        with pytest.raises(InvalidInput):
            store.sweep(prefix)

    def test_a_missing_object_is_not_found(self, store: Store) -> None:
        """`get` and `read_into` raise NotFound, `size` returns None."""
        store.put("there/object", b"x")
        for name in ("missing", "there/missing", "missing/object", "there", "there/object/below"):
            with pytest.raises(NotFound):
                store.get(name)
            with pytest.raises(FileNotFoundError):
                store.read_into(name, 0, memoryview(bytearray(1)))
            assert store.size(name) is None

    @pytest.mark.parametrize("num_bytes", [10, 3 * BLOCK_BYTES + 5, (1 << 20) + 3])
    def test_any_range_can_be_read(self, store: Store, num_bytes: int) -> None:
        """`read_into` fills aligned and unaligned buffers from any offset."""
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
                buffer = _aligned(stop - start + shift)[shift:]
                store.read_into("a", start, buffer)
                assert buffer == data[start:stop], (start, stop, shift)

    def test_lent_bytes_equal_the_range(self, store: Store) -> None:
        """`read_view` returns the bytes that `read_into` would read, as a read-only view."""
        data = _pattern(3 * BLOCK_BYTES + 5)
        store.put("a", data)
        for start, stop in ((0, len(data)), (1, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES), (5, 6)):
            lent = store.read_view("a", start, stop - start)
            assert lent == data[start:stop]
            assert lent.readonly
        with pytest.raises(NotFound):
            store.read_view("missing", 0, 1)

    def test_flush_and_close_lose_nothing(self, store: Store) -> None:
        """A store can be used again after `close`. `check` and `flush` do not change objects."""
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
        """`read_into` past the end of an object raises Corrupt with the object's name."""
        store.put("the-object", _pattern(num_bytes))
        wanted = [(0, num_bytes + 1), (num_bytes, 1), (num_bytes + BLOCK_BYTES, 1), (0, 8 * BLOCK_BYTES)]
        wanted += [(0, num_bytes + 2 * BLOCK_BYTES), (BLOCK_BYTES, 4 * BLOCK_BYTES)]
        for offset, length in wanted:
            with pytest.raises(Corrupt, match="the-object"):
                store.read_into("the-object", offset, _aligned(length))
            with pytest.raises(Corrupt, match="the-object"):
                store.read_view("the-object", offset, length)

    @pytest.mark.parametrize("num_bytes", [3, 2 << 20])
    def test_put_replaces_an_object_by_a_shorter_and_a_longer_one(self, store: Store, num_bytes: int) -> None:
        """No byte of the old object remains."""
        for length in (num_bytes, num_bytes - 1, num_bytes + 1, 0):
            store.put("a", _pattern(length, seed=length))
            assert store.get("a") == _pattern(length, seed=length)
            assert list(store.list()) == [ObjectInfo("a", length)]

    @pytest.mark.parametrize("num_bytes", [5000, (1 << 20) + 5])
    def test_readers_see_the_old_or_the_new_object(self, store: Store, num_bytes: int) -> None:
        """While an object is replaced, every read and listing returns one complete version of it."""
        store.put("d/a", b"0" * num_bytes)

        def replace() -> None:
            for number in range(NUM_ROUNDS):
                store.put("d/a", b"%d" % (number % 10) * (num_bytes + number % 2))

        def read() -> None:
            data, buffer = store.get("d/a"), _aligned(num_bytes)
            store.read_into("d/a", 0, buffer)
            for found in (data, bytes(buffer)):
                assert found == found[:1] * len(found)
            assert len(data) in (num_bytes, num_bytes + 1)
            assert [e.num_bytes - num_bytes in (0, 1) for e in store.list("d/")] == [True]

        _during(replace, read, num_threads=2)

    def test_if_absent_does_not_replace_an_object(self, store: Store) -> None:
        """`put(if_absent=True)` creates a new object, and raises Conflict if the name exists."""
        store.put("a", b"first", if_absent=True)
        with pytest.raises(Conflict):
            store.put("a", b"second", if_absent=True)
        assert store.get("a") == b"first"
        store.delete("a")
        store.put("a", b"third", if_absent=True)
        assert store.get("a") == b"third"

    def test_put_once_may_be_repeated_with_the_same_bytes(self, store: Store) -> None:
        """`put_once` raises Conflict only if the name has other bytes."""
        store.put_once("d/a", b"first")
        store.put_once("d/a", b"first")
        with pytest.raises(Conflict):
            store.put_once("d/a", b"second")
        assert store.get("d/a") == b"first"

    @pytest.mark.parametrize("num_bytes", [10, (1 << 20) + 1])
    def test_one_of_several_threads_creates_an_object(self, store: Store, num_bytes: int) -> None:
        """If threads race to create a name with `if_absent`, exactly one succeeds."""
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

    def test_a_link_has_the_same_bytes_under_another_name(self, store: Store) -> None:
        """A link replaces an existing object, and survives the deletion of its source."""
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

    def test_a_link_to_a_missing_object_is_not_found(self, store: Store) -> None:
        """A link that fails does not change the object under the new name."""
        store.put("b", b"old")
        with pytest.raises((NotFound, Unsupported)):
            store.link("missing", "b")
        assert store.get("b") == b"old"

    def test_list_returns_names_and_sizes_by_prefix(self, store: Store) -> None:
        """`list` returns every object whose name starts with the prefix. It may end within a part."""
        names = ["run.json", "step-01/a", "step-01/b/c", "step-010/a", "step-02/a", "steps"]
        for length, name in enumerate(names):
            store.put(name, b"x" * length)
        prefixes = "", "s", "step-0", "step-01", "step-01/", "step-01/b", "step-01/b/c", "steps", "zz"
        for prefix in (*prefixes, "step-01/a/"):
            found = sorted((one.name, one.num_bytes) for one in store.list(prefix))
            assert found == [(name, i) for i, name in enumerate(names) if name.startswith(prefix)], prefix

    def test_an_unused_store_is_empty(self, store: Store) -> None:
        """`list`, `size`, `delete` and `sweep` of a store that was never written do not raise."""
        assert list(store.list()) == []
        assert list(store.list("a/b")) == []
        assert store.size("a") is None
        store.delete("a/b")
        store.sweep()

    def test_an_unfinished_put_is_never_listed(self, store: Store) -> None:
        """While objects are being written, listings contain only complete ones."""
        num_bytes, seen = (1 << 20) + 5, set[ObjectInfo]()
        data = _pattern(num_bytes)

        def write() -> None:
            for number in range(NUM_ROUNDS):
                store.put(f"d/{number}", data, if_absent=number % 2 == 0)

        _during(write, lambda: seen.update(store.list()))
        expected = {ObjectInfo(f"d/{number}", num_bytes) for number in range(NUM_ROUNDS)}
        assert seen <= expected
        assert set(store.list()) == expected

    def test_append_adds_at_the_end(self, store: Store) -> None:
        """`append` creates a log or extends it. A log is read and listed like any object."""
        lines = [b"line %d\n" % number for number in range(100)]
        for line in lines:
            store.append("history/log", line)
        assert store.get("history/log") == b"".join(lines)
        assert list(store.list("history/")) == [ObjectInfo("history/log", len(b"".join(lines)))]

    def test_delete_removes_one_object(self, store: Store) -> None:
        """`delete` removes one object, and does not raise if it is missing."""
        for name in ("d/a", "d/ab", "d/e/f"):
            store.put(name, b"x")
        store.delete("d/a")
        store.delete("d/a")
        store.delete("never/was")
        assert store.size("d/a") is None
        assert {entry.name for entry in store.list()} == {"d/ab", "d/e/f"}

    def test_delete_does_not_remove_objects_below_a_name(self, store: Store) -> None:
        """Deleting the name of a "directory" does not delete the objects in it."""
        store.put("d/a", b"x")
        store.delete("d")
        store.delete("d/a/b")
        assert store.get("d/a") == b"x"

    def test_an_empty_directory_can_be_used_again(self, store: Store) -> None:
        """New objects can be put into a "directory" after all its objects were deleted."""
        for _ in range(3):
            store.put("d/e/a", b"x")
            store.delete("d/e/a")
        store.put("d/e/a", b"y")
        assert store.get("d/e/a") == b"y"

    def test_put_and_delete_of_neighbours_do_not_disturb_each_other(self, store: Store) -> None:
        """Threads that put and delete different names in one "directory" do not fail."""

        def work(number: int) -> None:
            for turn in range(NUM_ROUNDS):
                store.put(f"d/e/{number}", b"%d" % turn, if_absent=turn % 2 == 0)
                assert store.get(f"d/e/{number}") == b"%d" % turn
                store.delete(f"d/e/{number}")

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(work, range(NUM_THREADS)))
        assert list(store.list()) == []

    def test_many_threads_put_different_names(self, store: Store) -> None:
        """Concurrent puts to different names all succeed."""

        def work(number: int) -> None:
            store.put(f"d{number % 3}/{number}", _pattern(number * 1000, seed=number))

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(work, range(50)))
        for number in range(50):
            assert store.get(f"d{number % 3}/{number}") == _pattern(number * 1000, seed=number)
        assert len(list(store.list())) == 50

    def test_sweep_does_not_delete_objects(self, store: Store) -> None:
        """`sweep` keeps all objects, with and without a prefix."""
        for name in ("a", "d/a", "d/e/a"):
            store.put(name, b"x")
        for prefix in ("", "d/", "d", "nothing"):
            store.sweep(prefix)
        assert {entry.name for entry in store.list()} == {"a", "d/a", "d/e/a"}

    def test_sweep_does_not_disturb_puts_in_progress(self, store: Store) -> None:
        """Puts succeed while another thread sweeps continuously."""

        def write() -> None:
            for number in range(NUM_ROUNDS):
                store.put(f"d{number}/a", b"x" * 5000, if_absent=number % 2 == 0)

        _during(write, store.sweep)
        assert len(list(store.list())) == NUM_ROUNDS

    def test_an_empty_store_has_a_url_and_properties(self, store: Store) -> None:
        """`url` and `properties` are valid before any object is written."""
        assert isinstance(store.url, str)
        assert store.url
        assert store.properties.survives_host in (True, False)


def _during(work: Callable[[], None], look: Callable[[], object], *, num_threads: int = 1) -> None:
    """Call `look` again and again, in each of some threads, until another thread has done its work."""

    def watch() -> None:
        is_done = False
        while not is_done:
            is_done = working.done()
            look()

    with ThreadPoolExecutor(num_threads + 1) as pool:
        working = pool.submit(work)
        for watching in [pool.submit(watch) for _ in range(num_threads)]:
            watching.result()
        working.result()


def _pattern(num_bytes: int, *, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def _aligned(num_bytes: int) -> memoryview:
    """Return zeroed memory that begins at a page boundary."""
    return memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]


def _buffer(kind: Any, data: bytes) -> Any:
    """Return a copy of `data` in a buffer of a type, or in mapped memory."""
    if kind != "mmap":
        return kind(data)
    buffer = _aligned(len(data))
    buffer[:] = data
    return buffer
