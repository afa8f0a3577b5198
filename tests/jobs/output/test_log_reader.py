"""Reading of logs: whole lines in any chunks, carriage returns, tails, times, removed parts, huge lines."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.jobs.output import (
    LogReader,
    LogSampler,
    add_sample,
    interleaved,
    last_lines,
    last_texts,
    limit_bytes,
    read_samples,
    times_path,
    with_prefix,
)
from holdfast.system.linux.files import punch_hole

BAR = b"\r 10%|#         | 1/10\r 50%|#####     | 5/10\r100%|##########| 10/10\n"


def read(path: Path, *, tail: int | None = None) -> bytes:
    """Return all output of a log."""
    reader = LogReader(path, tail=tail)
    return b"".join(block.data for block in reader.blocks(is_end=True))


@given(st.lists(st.binary(max_size=40), max_size=10), st.booleans())
def test_lines_are_read_whole_in_whatever_chunks_they_are_written(chunks: list[bytes], is_timed: bool):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        reader = LogReader(path, is_timed=is_timed)
        assert list(reader.blocks()) == []
        found = b""
        written = 0
        with path.open("ab", buffering=0) as file:
            for chunk in chunks:
                file.write(chunk)
                written += len(chunk)
                add_sample(times_path(path), written, float(written))
                for block in reader.blocks():
                    assert block.data.endswith(b"\n")
                    found += block.data
        found += b"".join(block.data for block in reader.blocks(is_end=True))
        assert found == last_texts(b"".join(chunks))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (BAR, b"100%|##########| 10/10\n"),
        (BAR.rstrip(b"\n") + b"\r\n", b"100%|##########| 10/10\n"),
        (b"windows\r\nlines\r\n", b"windows\nlines\n"),
        (b"50%\r    \rdone\n", b"done\n"),
        (b"a\nb\rc\nd\n", b"a\nc\nd\n"),
        (b"50%\r60%", b"60%"),
    ],
)
def test_a_progress_bar_is_one_line(tmp_path: Path, written: bytes, shown: bytes) -> None:
    (tmp_path / "log").write_bytes(written)
    assert read(tmp_path / "log") == shown
    assert last_lines(tmp_path / "log", 1) == [shown.decode().splitlines()[-1]]


def test_the_progress_of_an_incomplete_line_is_known(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"begins\n" + BAR.rstrip(b"\n"))
    reader = LogReader(path)
    assert [block.data for block in reader.blocks()] == [b"begins\n"]
    assert reader.progress == b"100%|##########| 10/10"
    with path.open("ab") as file:
        file.write(b"\rdone\nplain")
    assert [block.data for block in reader.blocks()] == [b"done\n"]
    assert reader.progress == b""


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_a_tail_has_the_last_lines(tmp_path: Path, ending: bytes) -> None:
    path = tmp_path / "log"
    lines = [f"line {number} {'x' * (number % 7 * 100_000)}".encode() for number in range(40)]
    path.write_bytes(b"\n".join(lines) + ending)
    for number in (1, 2, 7, 39, 40, 41):
        assert read(path, tail=number) == b"\n".join(lines[-number:]) + ending
    assert read(path, tail=0) == b""
    path.write_bytes(b"")
    assert read(path, tail=3) == b""


def test_each_line_has_the_time_of_the_second_in_which_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\nfour\n")
    os.utime(path, (99.0, 99.0))
    for size, unix_s in ((4, 10.0), (9, 11.0), (14, 12.0)):  # the second sample is within "three"
        add_sample(times_path(path), size, unix_s)
    reader = LogReader(path, is_timed=True)
    found = [(block.data, block.unix_s) for block in reader.blocks()]
    assert found == [(b"one\n", 10.0), (b"two\n", 11.0), (b"three\n", 12.0), (b"four\n", 99.0)]


def test_nodes_are_interleaved_by_time(tmp_path: Path) -> None:
    first, second = tmp_path / "node-0.log", tmp_path / "node-1.log"
    first.write_bytes(b"a\nc\n")
    second.write_bytes(b"b\nd\n")
    for path, times in ((first, (1.0, 3.0)), (second, (2.0, 4.0))):
        for number, unix_s in enumerate(times, 1):
            add_sample(times_path(path), 2 * number, unix_s)
    readers = [LogReader(first, 0, is_timed=True), LogReader(second, 1, is_timed=True)]
    found = [(block.node, block.data) for block in interleaved(readers, is_end=True)]
    assert found == [(0, b"a\n"), (1, b"b\n"), (0, b"c\n"), (1, b"d\n")]


def test_prefixes_are_only_at_the_beginning_of_lines() -> None:
    assert with_prefix(b"a\nb\n", b"> ", is_line_start=True) == b"> a\n> b\n"
    assert with_prefix(b"a\nb", b"> ", is_line_start=False) == b"a\n> b"
    assert with_prefix(b"\n\n", b"> ", is_line_start=True) == b"> \n> \n"


@pytest.mark.parametrize("kind", ["lines", "one line", "one progress bar"])
def test_a_large_log_is_read_with_flat_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    line = {"lines": b"x" * 99 + b"\n", "one line": b"x" * 100, "one progress bar": b"\r" + b"x" * 99}[kind]
    with path.open("wb") as file:
        for _ in range(100):
            file.write(line * 10_000)
    reader = LogReader(path, is_timed=True)
    tracemalloc.start()
    try:
        num_bytes = sum(len(block.data) for block in reader.blocks(is_end=True))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert num_bytes == (99 if kind == "one progress bar" else 100_000_000)


def test_a_long_log_keeps_its_beginning_and_end_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    limit = 4 << 20
    line = b"%07d " + b"x" * 91 + b"\n"
    reader = LogReader(path, is_timed=True)
    with path.open("ab", buffering=0) as file:
        sampler = LogSampler(path, file.fileno(), "4MiB")
        for begin in range(0, 400_000, 1000):
            file.write(b"".join(line % number for number in range(begin, begin + 1000)))
            sampler.poll()
            assert os.fstat(file.fileno()).st_blocks * 512 < limit + (1 << 20)
            if begin == 0:
                next(reader.blocks())  # a reader that has fallen behind
    found = read(path)
    lines = found.splitlines()
    assert (lines[0], lines[-1] + b"\n") == ((line % 0).rstrip(b"\n"), line % 399_999)
    (notice,) = [one for one in lines if one.startswith(b"holdfast:")]
    assert b"of output were removed here" in notice
    assert b"\0" not in found
    assert limit // 2 < len(found) < limit
    assert read(path, tail=2) == line % 399_998 + line % 399_999
    assert read(path, tail=1_000_000).splitlines()[-1] == lines[-1]
    behind = b"".join(block.data for block in reader.blocks(is_end=True))
    assert behind.count(b"removed here") == 1
    assert behind.endswith(line % 399_999)


def test_a_part_that_was_removed_within_a_block_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    hole, line = (64 << 10, 128 << 10), b"x" * 63 + b"\n"
    path.write_bytes(line * (256 << 4))
    with path.open("r+b") as file:
        punch_hole(file.fileno(), hole[0], hole[1] - hole[0])
    found = read(path)
    assert b"\0" not in found
    assert found.count(line) == (256 << 4) - (hole[1] - hole[0]) // len(line)
    assert found.count(b"of output were removed here") == 1


def test_a_log_within_its_limit_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    with path.open("ab", buffering=0) as file:
        sampler = LogSampler(path, file.fileno(), "none")
        file.write(b"x" * (3 << 20))
        sampler.poll()
        LogSampler(path, file.fileno(), "many")
    assert read(path)[: 3 << 20] == b"x" * (3 << 20)
    assert b"HOLDFAST_LOG_LIMIT must be a size" in read(path)
    with pytest.raises(InvalidInput, match="at least 1MiB"):
        limit_bytes("1kB")


def test_a_log_that_its_owner_empties_has_the_times_of_its_new_lines(tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    with path.open("ab", buffering=0) as file:
        sampler = LogSampler(path, file.fileno(), "none")
        for text in (b"x" * 100, b"x" * 100, None, b"new\n"):
            if text is None:
                file.truncate(0)
            else:
                file.write(text)
            sampler.poll()
    assert [size for size, _ in read_samples(times_path(path), -1, 1000)] == [0, 4]


def test_times_are_thinned_out_when_they_become_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.jobs.output._MAX_TIMES_BYTES", 1600)
    path = tmp_path / "log"
    for number in range(1, 1001):
        add_sample(path, number, float(number))
    assert path.stat().st_size <= 1616
    assert read_samples(path, 999, 1000) == [(1000, 1000.0)]
    size, unix_s = read_samples(path, 499, 500)[0]
    assert 500.0 <= size == unix_s <= 700.0
