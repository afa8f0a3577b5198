"""The model of crash states: what POSIX lets a power cut lose, shown on a few system calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.crash_states.operations import Log, read_log
from campaigns.crash_states.states import State, content, cuts, draw, promises, tree
from campaigns.crash_states.trace import parse

PLACE = "/work"
OPEN = f'1 openat(AT_FDCWD</>, "{PLACE}/NAME", O_RDWR|O_CREAT|O_EXCL, 0666) = 3<{PLACE}/NAME>'
WRITE = f'1 write(3<{PLACE}/NAME>, "DATA", 4) = 4'
SYNC = f"1 fsync(3<{PLACE}/NAME>) = 0"
SYNC_FOLDER = f"1 fsync(4<{PLACE}>) = 0"
MARK = '1 write(5</dev/null>, "mark durable 1 6\\n", 17) = 17'


def log_of(*lines: str) -> Log:
    return read_log(parse([line.replace("NAME", "a") for line in lines], (PLACE, "</dev/null>")), Path(PLACE))


def ends(log: Log, cut: int) -> set[tuple[tuple[str, bytes], ...]]:
    """Everything that a crash before a line may leave: the files with their bytes."""
    found = set()
    for _, (_, state) in zip(range(3000), draw(log, 0), strict=False):
        if state.cut == cut:
            files = tree(log, state).files
            found.add(tuple((name, content(log, state, number)) for name, number in sorted(files.items())))
    return found


def last(log: Log) -> int:
    return max(cuts(log))


RENAME = f'1 rename("{PLACE}/NAME", "{PLACE}/b") = 0'
DURING = (f"2 fsync(4<{PLACE}> <unfinished ...>", RENAME, "2 <... fsync resumed>) = 0")
LEFT = {
    "data that was never synced may survive or not": ([OPEN], {(), (("a", b""),)}),
    "a file's own fsync keeps its bytes but not its name": ([OPEN, WRITE, SYNC], {(), (("a", b"DATA"),)}),
    "data that both fsyncs cover is safe": ([OPEN, WRITE, SYNC, SYNC_FOLDER], {(("a", b"DATA"),)}),
    "an fsync does not cover writes that began after it": ([OPEN, *DURING], {(("a", b""),), (("b", b""),)}),
    "a rename is kept as a whole or not at all": (
        [OPEN, WRITE, SYNC, SYNC_FOLDER, RENAME],
        {(("a", b"DATA"),), (("b", b"DATA"),)},
    ),
}


@pytest.mark.parametrize(("lines", "expected"), LEFT.values(), ids=LEFT)
def test_a_crash_at_the_end_leaves(lines: list[str], expected: set[tuple[tuple[str, bytes], ...]]):
    log = log_of(*lines)
    assert ends(log, last(log)) == expected


def test_the_fsync_of_a_directory_keeps_the_name_but_not_the_bytes():
    log = log_of(OPEN, WRITE, SYNC_FOLDER)
    found = {files[0][1] for files in ends(log, last(log))}
    assert {b"", b"DATA", bytes(4)} <= found


def test_a_crash_before_the_fsync_returns_may_lose_everything():
    log = log_of(OPEN, WRITE, SYNC, SYNC_FOLDER)
    assert () in ends(log, 4)


def test_entries_of_one_directory_may_be_kept_in_any_order():
    log = log_of(OPEN, OPEN.replace("NAME", "b"))
    names = {tuple(name for name, _ in files) for files in ends(log, last(log))}
    assert names == {(), ("a",), ("b",), ("a", "b")}


def test_names_of_one_file_share_their_bytes():
    log = log_of(OPEN, WRITE, SYNC, f'1 link("{PLACE}/NAME", "{PLACE}/b") = 0', SYNC_FOLDER)
    found = tree(log, State(last(log), frozenset(), ())).files
    assert found["a"] == found["b"]


def test_a_kill_loses_nothing():
    log = log_of(OPEN, WRITE, RENAME)
    killed = [state for rule, state in draw_systematic(log) if rule == "killed" and state.cut == last(log)]
    assert {tuple(tree(log, state).files) for state in killed} == {("b",)}
    assert {content(log, state, 1) for state in killed} == {b"DATA"}


def draw_systematic(log: Log) -> list[tuple[str, State]]:
    return [one for one, _ in zip(draw(log, 0), range(100), strict=False)]


def test_a_promise_counts_from_the_moment_it_was_given():
    log = log_of(OPEN, MARK)
    assert promises(log, 2) == []
    assert promises(log, 3) == ["durable 1 6"]


def test_failed_calls_change_nothing():
    log = log_of(OPEN.replace("= 3<", "= -1 ENOENT (No such file or directory) <"))
    assert log.entries == []


def test_data_is_read_with_every_byte():
    data = bytes(range(256))
    text = "".join(f"\\{byte:03o}" for byte in data)
    log = log_of(OPEN, WRITE.replace("DATA", text).replace(" 4) = 4", " 256) = 256"))
    assert content(log, State(last(log), frozenset({0}), ()), 1) == data


def test_data_that_strace_cut_short_is_an_error():
    with pytest.raises(ValueError, match="cut the data"):
        log_of(OPEN, WRITE.replace('"DATA"', '"DATA"...'))


def test_a_call_that_the_model_does_not_support_is_an_error():
    with pytest.raises(ValueError, match="does not know"):
        log_of(f'1 symlink("/etc", "{PLACE}/b") = 0')
