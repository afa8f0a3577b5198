"""The verified reader: which chunks it reads, what it hands on, how it stops."""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.part import Part
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.read import READ_BYTES, FileRead, Want, read
from holdfast.checkpoint.store.contract import Properties
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.store.tiered import TieredStore
from holdfast.errors import Corrupt, HoldfastError, InvalidInput, NotFound, RetryLater
from making import flip, make_checkpoint

CHUNK = 4096


class Recorder(MemoryStore):
    """Remembers every range that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self.reads.append((name, offset, len(buffer)))
        super().read_into(name, offset, buffer)


class Taker:
    """Sink that keeps the delivered bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.data = bytearray(num_bytes)
        self.count = 0
        self.lock = threading.Lock()

    def __call__(self, offset: int, view: memoryview) -> None:
        with self.lock:
            self.data[offset : offset + len(view)] = view
            self.count += len(view)


def make_file(num_bytes: int, chunk_bytes: int = CHUNK) -> tuple[Recorder, Part, bytes]:
    """A store with one rank's file of one tensor; with its part and its image."""
    store = Recorder()
    tensor = torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    made = make_checkpoint(store, 1, 1, [{"t": tensor}], chunk_bytes=chunk_bytes)
    return store, Parts(store, made).part(0), store.get(names.data(1, 1, 0))


STORE, PART, IMAGE = make_file(40 * CHUNK + 17)


def wants(ranges: list[tuple[int, int]]) -> list[Want]:
    return [Want(start, num_bytes, Taker(num_bytes)) for start, num_bytes in ranges]


@settings(deadline=None)
@given(
    st.lists(
        st.integers(0, len(IMAGE)).flatmap(
            lambda start: st.tuples(st.just(start), st.integers(0, len(IMAGE) - start))
        ),
        max_size=12,
    ),
    st.integers(1, 5),
)
def test_any_ranges_arrive_and_each_needed_chunk_is_read_once(
    ranges: list[tuple[int, int]], threads: int
) -> None:
    store = Recorder()
    store.put(names.data(1, 1, 0), IMAGE)
    wanted = wants(ranges)
    stats = read(store, [FileRead(PART, wanted)], num_threads=threads)
    for (start, num_bytes), want in zip(ranges, wanted, strict=True):
        assert isinstance(want.sink, Taker)
        assert bytes(want.sink.data) == IMAGE[start : start + num_bytes]
        assert want.sink.count == num_bytes
    needed = {
        c for start, size in ranges if size for c in range(start // CHUNK, (start + size - 1) // CHUNK + 1)
    }
    got = [c for _, start, size in store.reads for c in range(start // CHUNK, -(-(start + size) // CHUNK))]
    assert sorted(got) == sorted(needed)
    assert stats.num_bytes == sum(size for *_, size in store.reads)
    assert stats.num_reads == len(store.reads)


LONG_STORE, LONG_PART, LONG_IMAGE = make_file(2 * READ_BYTES + (512 << 10), 64 << 10)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, len(LONG_IMAGE)), min_size=2, max_size=8).map(sorted))
def test_ranges_over_several_reads_arrive_once(cuts: list[int]) -> None:
    """A want may begin before the read that brings its end."""
    ranges = [(start, stop - start) for start, stop in pairwise(cuts)]
    wanted = wants(ranges)
    read(LONG_STORE, [FileRead(LONG_PART, wanted)], num_threads=3)
    for (start, num_bytes), want in zip(ranges, wanted, strict=True):
        assert isinstance(want.sink, Taker)
        assert bytes(want.sink.data) == LONG_IMAGE[start : start + num_bytes]
        assert want.sink.count == num_bytes


def test_adjacent_chunks_are_read_together_but_bounded() -> None:
    chunk_bytes = 64 << 10
    store, part, image = make_file(2 * READ_BYTES + 5 * chunk_bytes, chunk_bytes)
    taker = Taker(len(image))
    read(store, [FileRead(part, [Want(0, len(image), taker)])], num_threads=2)
    assert bytes(taker.data) == image
    assert sorted(size for *_, size in store.reads)[-2:] == [READ_BYTES, READ_BYTES]
    assert len(store.reads) == 3
    assert all(offset % CHUNK == 0 for _, offset, _ in store.reads)


class Mapped(MemoryStore):
    """A store whose bytes are in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.properties = Properties(survives_host=False, zero_copy_views=True)

    def read_view(self, name: str, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self.get(name))[offset : offset + num_bytes]


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[MemoryStore], list[set[int]]]:
    """Two to four copies of the file, and the damaged chunks of each; all of them if it has no file."""
    found: list[MemoryStore] = []
    damage: list[set[int]] = []
    every = set(range(len(PART.file.hashes) // 32))
    for number in range(draw(st.integers(2, 4))):
        copy = draw(st.sampled_from([MemoryStore, Mapped]))()
        copy.url = f"copy {number}"
        bad = draw(st.sets(st.sampled_from(sorted(every)), max_size=4))
        if draw(st.integers(0, 4)):
            copy.put(names.data(1, 1, 0), IMAGE)
            if bad:
                flip(copy, names.data(1, 1, 0), *(min(chunk * CHUNK + 7, len(IMAGE) - 1) for chunk in bad))
        else:
            bad = every
        found.append(copy)
        damage.append(bad)
    return found, damage


@settings(deadline=None)
@given(copies())
def test_each_chunk_comes_from_its_nearest_good_copy(made: tuple[list[MemoryStore], list[set[int]]]) -> None:
    """Also if no copy of the file is whole, as long as each chunk is good somewhere."""
    found, damage = made
    taker = Taker(len(IMAGE))
    jobs = [FileRead(PART, [Want(0, len(IMAGE), taker)])]
    if set.intersection(*damage):
        with pytest.raises((Corrupt, NotFound)):
            read(TieredStore(found), jobs)
        assert taker.count == 0
        return
    stats = read(TieredStore(found), jobs)
    assert taker.data == IMAGE
    assert taker.count == len(IMAGE)
    expected: dict[str, int] = {}
    for chunk in range(len(PART.file.hashes) // 32):
        url = next(copy.url for copy, bad in zip(found, damage, strict=True) if chunk not in bad)
        expected[url] = expected.get(url, 0) + min(CHUNK, len(IMAGE) - chunk * CHUNK)
    assert stats.sources == expected


@pytest.mark.parametrize("position", [0, 5, CHUNK, 20 * CHUNK + 1, len(IMAGE) - 1])
def test_a_damaged_chunk_is_named_and_not_handed_on(position: int) -> None:
    store = Recorder()
    store.put(names.data(1, 1, 0), IMAGE)
    flip(store, names.data(1, 1, 0), position)
    taker = Taker(len(IMAGE))
    with pytest.raises(Corrupt, match=f"chunk {position // CHUNK} ") as caught:
        read(store, [FileRead(PART, [Want(0, len(IMAGE), taker)])], num_threads=1)
    assert names.data(1, 1, 0) in str(caught.value)
    assert caught.value.key == ("t" if position >= PART.starts[0] else names.data(1, 1, 0))
    assert ("header" in str(caught.value)) == (position < PART.starts[0])
    assert PART.file.hash_of(position // CHUNK) in str(caught.value)
    assert taker.count == 0


def test_with_on_error_all_damage_is_collected_and_the_rest_is_read() -> None:
    store = Recorder()
    store.put(names.data(1, 1, 0), IMAGE)
    flip(store, names.data(1, 1, 0), *(chunk * CHUNK + 9 for chunk in (3, 4, 11)))
    errors: list[HoldfastError] = []
    stats = read(store, [FileRead(PART, wants([(0, len(IMAGE))]))], on_error=errors.append)
    assert sorted(str(error).split("chunk ")[1].split()[0] for error in errors) == ["11", "3", "4"]
    assert stats.num_bytes == len(IMAGE)


def test_the_first_error_stops_the_others_and_is_the_one_that_is_raised() -> None:
    class Failing(Recorder):
        def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
            super().read_into(name, offset, buffer)
            if len(self.reads) == 2:
                raise RetryLater("gone away")

    store = Failing()
    chunk_bytes = 1 << 20
    base, part, image = make_file(40 * READ_BYTES // 8, chunk_bytes)
    store.put(names.data(1, 1, 0), base.get(names.data(1, 1, 0)))
    with pytest.raises(RetryLater, match="gone away"):
        read(store, [FileRead(part, wants([(0, len(image))]))], num_threads=1)
    assert len(store.reads) == 2


def test_all_threads_have_ended_when_an_error_is_raised() -> None:
    store = Recorder()
    store.put(names.data(1, 1, 0), IMAGE[:-1])
    with pytest.raises(Corrupt):
        read(store, [FileRead(PART, wants([(0, len(IMAGE))]))], num_threads=8)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]


def test_an_error_of_a_sink_or_a_callback_is_raised_too() -> None:
    def broken_sink(offset: int, view: memoryview) -> None:
        raise ZeroDivisionError

    def broken(num_bytes: int) -> None:
        raise KeyError(num_bytes)

    with pytest.raises(ZeroDivisionError):
        read(STORE, [FileRead(PART, [Want(0, 9, broken_sink)])])
    with pytest.raises(KeyError):
        read(STORE, [FileRead(PART, wants([(0, 9)]))], on_bytes=broken)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(NotFound):
        read(MemoryStore(), [FileRead(PART, wants([(0, 9)]))])


def test_without_requests_nothing_is_read() -> None:
    assert read(MemoryStore(), [FileRead(PART, wants([(0, 0), (77, 0)]))]).num_reads == 0
    assert read(MemoryStore(), []).num_bytes == 0


def test_no_threads_is_refused() -> None:
    with pytest.raises(InvalidInput):
        read(STORE, [], num_threads=0)
