"""Stacks of processes, their places and groups, and captures of real processes."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.system.linux.locks import try_flock
from holdfast.watch.hang import stacks as capturing
from holdfast.watch.hang.incidents import (
    RankEvidence,
    decode_evidence,
    describe_hang,
    encode_evidence,
    format_stacks,
    group_ranks,
    list_hangs,
)
from holdfast.watch.hang.stacks import (
    MAX_FRAMES,
    Frame,
    Kind,
    ProcessStacks,
    Thread,
    capture,
    find_place,
    main_thread,
    parse_stacks,
)

STDLIB = sysconfig.get_path("stdlib")
TORCH = "/v/lib/python3.11/site-packages/torch"
USER = Frame("/home/me/train.py", 88, "train_step")
ALL_REDUCE = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"), USER)
BACKWARD = (
    Frame(f"{TORCH}/autograd/graph.py", 869, "_engine_run_backward"),
    Frame(f"{TORCH}/autograd/__init__.py", 300, "backward"),
    Frame(f"{TORCH}/_tensor.py", 600, "backward"),
    USER,
)
LOADER = (
    Frame(f"{STDLIB}/selectors.py", 415, "select"),
    Frame(f"{TORCH}/utils/data/dataloader.py", 1291, "_try_get_data"),
    Frame(f"{TORCH}/utils/data/dataloader.py", 725, "__next__"),
    USER,
)
SYNC = (
    Frame("/s/src/holdfast/ranks.py", 200, "wait"),
    Frame("/s/src/holdfast/checkpointer/interface.py", 1, "steps"),
    USER,
)


def evidence(rank: int, frames: tuple[Frame, ...], step: int = 7, **members: object) -> RankEvidence:
    state = str(members.pop("state", "waiting"))
    threads = (Thread(2, (USER,)), Thread(1, frames)) if frames else ()
    process = ProcessStacks(100 + rank, state, threads)
    return RankEvidence(rank, "host", step, "", 61.0, 60.0, 1, process, **members)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("frames", "kind", "text"),
    [
        (ALL_REDUCE, Kind.WAITS, "all_reduce, called at train.py:88 (train_step)"),
        (BACKWARD, Kind.WAITS, "backward, called at train.py:88 (train_step)"),
        (LOADER, Kind.LOADS, "DataLoader.__next__, called at train.py:88 (train_step)"),
        (SYNC, Kind.SYNCS, "the exchange of the ranks after a step, called at train.py:88 (train_step)"),
        ((USER,), Kind.WORKS, "train.py:88 (train_step)"),
        ((), Kind.WORKS, "a place without Python frames"),
        (
            (Frame(f"{STDLIB}/queue.py", 171, "get"), USER),
            Kind.WORKS,
            "get, called at train.py:88 (train_step)",
        ),
        (
            (Frame("/v/lib/python3.11/site-packages/datasets/arrow.py", 5, "read"), USER),
            Kind.WORKS,
            "read (datasets/arrow.py:5), called at train.py:88 (train_step)",
        ),
        ((Frame(f"{TORCH}/_inductor/codecache.py", 9, "compile"), USER), Kind.COMPILES, "compile"),
        ((USER, Frame("/home/me/train.py", 9, "evaluate")), Kind.EVALUATES, "train.py:88"),
        ((*ALL_REDUCE, Frame("/home/me/train.py", 9, "validation_epoch")), Kind.EVALUATES, "all_reduce"),
        ((USER, Frame("/home/me/train.py", 9, "train_and_evaluate")), Kind.WORKS, "train.py:88"),
        ((Frame(f"{STDLIB}/pdb.py", 9, "interaction"), USER), Kind.DEBUGS, "interaction"),
    ],
)
def test_the_place_of_a_thread(frames: tuple[Frame, ...], kind: Kind, text: str) -> None:
    found = find_place(Thread(1, frames))
    assert found.kind is kind
    assert found.describe().startswith(text)


@pytest.mark.parametrize(
    ("ranks", "odd"),
    [
        ((evidence(0, BACKWARD), evidence(1, BACKWARD), evidence(2, LOADER, 6)), [(2,)]),
        ((evidence(0, ALL_REDUCE), evidence(1, (), state="stopped")), [(1,)]),
        ((evidence(0, ALL_REDUCE), evidence(1, ALL_REDUCE, state="waiting for a device")), [(1,)]),
        ((evidence(0, ALL_REDUCE), evidence(1, BACKWARD), evidence(2, BACKWARD)), [(0,)]),
        ((evidence(0, ALL_REDUCE, 7), evidence(1, BACKWARD, 8)), [(1,)]),  # it has skipped the all_reduce
        ((evidence(0, ALL_REDUCE), evidence(1, SYNC)), [(1,)]),
        ((evidence(0, ALL_REDUCE), evidence(1, BACKWARD)), []),  # nothing tells them apart
        ((evidence(0, ALL_REDUCE), evidence(1, ALL_REDUCE)), []),
        ((evidence(0, (USER,)),), [(0,)]),
    ],
)
def test_the_ranks_that_the_others_wait_for(
    ranks: tuple[RankEvidence, ...], odd: list[tuple[int, ...]]
) -> None:
    groups = group_ranks(ranks)
    assert [one.ranks for one in groups if one.is_odd] == odd
    assert sorted(rank for one in groups for rank in one.ranks) == list(range(len(ranks)))


def test_the_block_names_places_missing_ranks_and_what_is_done() -> None:
    ranks = [*(evidence(rank, BACKWARD) for rank in (0, 1, 2, 4)), evidence(5, LOADER, 6)]
    text = describe_hang(ranks, world_size=8, action="Nothing was done.", home="runs/\x1b[1mx")
    assert text.splitlines() == [
        "THE TRAINING HANGS: rank 0 has made no progress for 1 min 1 s in the step after 7 "
        "(limit 1 min 0 s).",
        "  > rank 5: in DataLoader.__next__, called at train.py:88 (train_step) (after step 6)",
        "    ranks 0-2, 4: in backward, called at train.py:88 (train_step) (after step 7)",
        "  ranks 3, 6-7: no evidence, as their own limit is not reached",
        "  Nothing was done. All stacks: holdfast stacks runs/\\x1b[1mx --recorded",
    ]
    assert "    thread 0x1, which trains" in format_stacks(ranks[0])


def test_a_real_text_of_faulthandler_is_parsed() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = parse_stacks(file.read())
    own = [one for one in threads if any("test_a_real_text" in frame.function for frame in one.frames)]
    assert len(own) == 1
    assert own[0].frames[0].file == __file__
    assert main_thread(threads, own[0].ident) is own[0]


@given(st.text(max_size=2000))
def test_any_text_is_parsed(text: str) -> None:
    parse_stacks(text)
    head = "Current thread 0x00007f0000000001 (most recent call first):\n"
    for thread in parse_stacks(head + '  File "a.py", line 3 in f\n' * 200 + text):
        assert len(thread.frames) <= MAX_FRAMES


def test_evidence_survives_the_history_and_damage_is_left_out() -> None:
    one = evidence(3, LOADER, workers=(ProcessStacks(9, "waiting", (Thread(5, (USER,)),)),))
    line = {"event": "hang", "t": 5.0, "attempt": 2, "evidence": encode_evidence(one)}
    assert decode_evidence(line) == one
    for damaged in ({}, {"rank": "x"}, [], None, {**encode_evidence(one), "process": 3}):
        assert decode_evidence({**line, "evidence": damaged}) is None


def test_very_large_stacks_fit_into_a_line() -> None:
    deep = Thread(1, tuple(Frame("/a" * 100, 1, "f" * 100) for _ in range(MAX_FRAMES)))
    one = evidence(0, (USER,))
    huge = RankEvidence(0, "h", 1, "", 1.0, 1.0, 1, ProcessStacks(1, "running", (deep,) * 64), one.workers)
    found = decode_evidence({"event": "hang", "evidence": encode_evidence(huge)})
    assert found is not None
    assert 1 <= len(found.process.threads) < 64


def test_records_of_several_ranks_are_one_hang_each_time() -> None:
    def line(unix_s: float, rank: int, event: str = "hang") -> dict[str, Any]:
        body: dict[str, Any] = {"t": unix_s, "event": event, "attempt": 1, "rank": rank, "seconds": 90.0}
        return body | ({"evidence": encode_evidence(evidence(rank, BACKWARD))} if event == "hang" else {})

    lines = [line(100, 0), line(103, 1), line(150, 0, "hang-over"), line(151, 1, "hang-over")]
    lines += [line(5000, 1), line(9000, 0)]
    found = list_hangs(lines)
    assert [([one.rank for one in hang.ranks], hang.over_s) for hang in found] == [
        ([0, 1], 90.0),
        ([1], None),
        ([0], None),
    ]


SLOW_WRITER = """
import os, signal, sys, time
number = int(sys.argv[1])
file = os.memfd_create("stacks")

def write(_, frame):
    # As faulthandler's handler, which the kernel runs with the signal blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    os.write(file, b'Thread 0x22 (most recent call first):\\n  File "/x/helper.py", line 1 in helper\\n')
    time.sleep(0.6)  # on a busy machine the process does not run for a while
    os.write(file, b'Thread 0x11 (most recent call first):\\n  File "/x/train.py", line 1 in step\\n')
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])

signal.signal(number, write)
print(file, flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def slow_writer() -> Iterator[tuple[int, int]]:
    """Yield the process id of a process that pauses while it writes its stacks, and their descriptor."""
    command = [sys.executable, "-c", SLOW_WRITER, str(int(capturing.STACKS_SIGNAL))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_a_writer_that_pauses_is_waited_for(slow_writer: tuple[int, int]) -> None:
    own, _ = capture(*slow_writer)
    assert [one.ident for one in own.threads] == [0x22, 0x11]


def test_another_capture_that_is_stopped_is_not_waited_for_without_end(
    slow_writer: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper that reports a hang would have hung itself."""
    monkeypatch.setattr(capturing, "_OTHERS_S", 0.1, raising=False)
    pid, fd = slow_writer
    with Path(f"/proc/{pid}/fd/{fd}").open("rb") as file:
        assert try_flock(file.fileno())
        own, workers = capture(pid, fd)
    assert (own.pid, own.threads, workers) == (pid, (), ())
