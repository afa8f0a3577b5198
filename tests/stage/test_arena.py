"""Arenas: their common memory limit, waiting, growth with the state, and the memory of a save."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.optim import AdamW

import holdfast
from holdfast.checkpoint.stage import Arena, Arenas
from holdfast.errors import InvalidInput, Preempted, RetryLater, SaveWarning
from holdfast.watch.preemption.sources import Notice, write_notice
from stage.training import (
    WAIT_S,
    CopyGate,
    check_saved,
    keeper_of,
    make_checkpointer,
    make_model,
    snapshot,
    train,
    wait_until,
)

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def memfd_bytes() -> int:
    """Bytes of all arenas that this process maps."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "/memfd:holdfast-arena" in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


def waiters_of(arenas: Arenas) -> Any:
    """The threads that wait for an arena."""
    changed: Any = arenas._changed
    return changed._waiters


def get(arenas: Arenas, num_bytes: int) -> Arena:
    """An arena that is there at once."""
    assert arenas.has_room(num_bytes)
    return arenas.acquire(num_bytes)


def test_the_memory_limit_applies_to_all_arenas_together() -> None:
    arenas = Arenas(10 * MIB)
    first, second = get(arenas, 4 * MIB), get(arenas, 4 * MIB)
    assert not arenas.has_room(4 * MIB)
    assert arenas.has_room(MIB)
    arenas.release(first)
    assert get(arenas, 3 * MIB) is first, "a free one is used again"
    arenas.release(first)
    arenas.release(second)
    arenas.close()
    assert arenas.numbers() == []


def test_arenas_leave_half_of_the_descriptors_to_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (48, 4096))
    arenas = Arenas(100 * MIB)
    several = [get(arenas, 4096) for _ in range(8)]  # of 3 descriptors each, once they are queued
    assert not arenas.has_room(4096)
    arenas.release(several[0])
    assert get(arenas, 4096) is several[0]
    arenas.close()


def test_acquire_waits_until_an_arena_is_released() -> None:
    arenas = Arenas(6 * MIB)
    only, got = get(arenas, 4 * MIB), []
    waiter = threading.Thread(target=lambda: got.append(arenas.acquire(4 * MIB)))
    waiter.start()
    wait_until(lambda: waiters_of(arenas))
    arenas.release(only)
    waiter.join(WAIT_S)
    assert got == [only]
    arenas.close()


def test_the_error_of_an_arena_over_the_limit_has_both_sizes() -> None:
    arenas = Arenas(4 * MIB)
    with pytest.raises(InvalidInput, match=r"arena of 5\.2 MB, but memory= allows 4\.2 MB"):
        arenas.acquire(5 * MIB)
    assert arenas.has_room(5 * MIB), "waiting would not help"
    assert arenas.numbers() == []


def test_an_arena_that_the_system_refuses_is_an_error_of_the_save() -> None:
    arenas = Arenas(2 << 60)
    with pytest.raises(RetryLater, match=r"refused an arena of .* Nothing was saved"):
        arenas.acquire(1 << 60)
    assert arenas.numbers() == []
    arenas.close()


def test_the_first_acquire_returns_the_prepared_arena() -> None:
    arenas, seen = Arenas(64 * MIB), []
    for _ in range(3):
        arenas.prepare(8 * MIB, then=seen.append)
    assert arenas.has_room(8 * MIB)
    arena = arenas.acquire(8 * MIB)
    assert seen == [arena]
    assert arenas.numbers() == [arena.number]
    arenas.close()


def test_acquire_waits_for_the_arena_in_preparation() -> None:
    arenas, gate, got = Arenas(64 * MIB), threading.Event(), []
    arenas.prepare(8 * MIB, then=lambda _: gate.wait(WAIT_S))
    assert arenas.has_room(8 * MIB), "it is on its way, and no earlier save holds it"
    waiter = threading.Thread(target=lambda: got.append(arenas.acquire(8 * MIB)))
    waiter.start()
    wait_until(lambda: waiters_of(arenas))
    gate.set()
    waiter.join(WAIT_S)
    assert [arena.number for arena in got] == arenas.numbers() == [1]
    arenas.close()


def test_a_failed_preparation_does_not_block_acquire(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next acquire raises the lack of memory once. The one after it tries again."""
    arenas = Arenas(64 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    arenas.prepare(8 * MIB, then=lambda _: None)
    with pytest.raises(RetryLater, match=r"does not have 8\.4 MB of memory"):
        arenas.wait_prepared()
    assert get(arenas, 8 * MIB).number == 2
    arenas.close()


def test_close_during_a_preparation_frees_all_memory() -> None:
    arenas, gate = Arenas(64 * MIB), threading.Event()
    before = memfd_bytes()
    arenas.prepare(8 * MIB, then=lambda _: gate.wait(WAIT_S))
    arenas.close()
    gate.set()
    wait_until(lambda: not any(thread.name == "holdfast-prefault" for thread in threading.enumerate()))
    assert arenas.numbers() == []
    assert memfd_bytes() <= before


def test_arenas_that_are_too_small_are_freed_for_a_larger_one() -> None:
    """Their pages are given back at once, even while something else still has them mapped."""
    arenas = Arenas(10 * MIB)
    small = [get(arenas, 4 * MIB), get(arenas, 4 * MIB)]
    held = os.dup(small[0].fd)
    for arena in small:
        arena.prefault()
        arenas.release(arena)
    assert get(arenas, 8 * MIB).number == 3
    assert arenas.numbers() == [3]
    assert os.fstat(held).st_blocks == 0
    os.close(held)
    arenas.close()


def test_the_error_names_a_lack_of_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files"))
    )
    with pytest.raises(RetryLater, match="Too many open files"):
        Arenas(MIB).acquire(1000)


# -- as a Checkpointer sees it -------------------------------------------------------------------------------


def make_state(width: int = 64) -> dict[str, Any]:
    model = make_model(width)
    state = {"model": model, "optimizer": AdamW(model.parameters())}
    train(model, state["optimizer"], width)
    return state


def test_a_skipped_save_is_counted_with_a_warning_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, home = make_state(), tmp_path / "home"
    gate = CopyGate(monkeypatch)
    with make_checkpointer(home, state, memory=holdfast.Memory("180kB", when_full="skip")) as ckpt:
        first = ckpt.save(1)
        with pytest.warns(SaveWarning, match=r"step 2 was skipped.*\(1 so far\)\. Raise memory="):
            skipped = ckpt.save(2)
        assert (skipped.skipped, skipped.failed, skipped.state) == (True, None, "skipped")
        assert ckpt.num_skipped == 1
        gate.opened.set()
        first.wait_durable()
        wait_until(lambda: ckpt._components.pipeline.arenas.has_room(100_000))
        expected = snapshot(state)
        ckpt.save(3)
    check_saved(home, 3, expected)
    assert sorted(path.name for path in home.glob("step-*")) == ["step-00000001", "step-00000003"]
    assert '"event":"skipped","step":2' in (home / "history" / "a0001-rank-00000.jsonl").read_text()


def open_when(is_true: Callable[[], object], gate: CopyGate) -> threading.Thread:
    """Start a thread that opens the gate once a condition holds."""

    def wait_and_open() -> None:
        try:
            wait_until(is_true)
        finally:
            gate.opened.set()

    thread = threading.Thread(target=wait_and_open)
    thread.start()
    return thread


def run_two_steps(home: Path, gate: CopyGate, *, total: int, is_preempted: bool) -> None:
    """Save after each step, with no room for the second save until it has been skipped."""
    notice = home.with_name(f"{home.name}-notice")
    watches = [holdfast.Preemption(f"file:{notice}", signals=False)]
    memory = holdfast.Memory("180kB", when_full="skip")
    with make_checkpointer(home, make_state(), memory=memory, every=1, watches=watches) as ckpt:
        opener = open_when(lambda: ckpt.num_skipped > 0, gate)
        try:
            for step in ckpt.steps(total):
                if step == 1 and is_preempted:
                    write_notice(notice, Notice("SIGTERM"))
        finally:
            opener.join()


@pytest.mark.parametrize(
    ("total", "ending"),
    [(2, nullcontext()), (10, pytest.raises(Preempted, match="after step 2; the checkpoint is durable"))],
    ids=["end", "preemption"],
)
def test_the_last_save_of_a_run_is_never_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, ending: Any
) -> None:
    """A run must not end as preempted and durable because there was no room at that moment."""
    gate = CopyGate(monkeypatch)
    with pytest.warns(SaveWarning, match="step 2 was skipped"), ending:
        run_two_steps(tmp_path, gate, total=total, is_preempted=total > 2)
    assert (tmp_path / "step-00000002" / "manifest-a0001.json").exists()


def test_a_save_that_waits_for_memory_reports_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, home = make_state(), tmp_path / "home"
    gate = CopyGate(monkeypatch)
    with make_checkpointer(home, state, memory="180kB") as ckpt:
        ckpt.save(1)
        before = ckpt.waited_for_memory_s
        opener = open_when(lambda: waiters_of(ckpt._components.pipeline.arenas), gate)
        expected = snapshot(state)
        ckpt.save(2)
        opener.join()
        assert ckpt.waited_for_memory_s > before
        assert len(ckpt._components.pipeline.arenas.numbers()) == 1
    check_saved(home, 2, expected)


def test_one_save_at_a_time_needs_the_memory_of_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": make_model(1024), "plain": torch.randn(1024, 1024)}
    state["optimizer"] = AdamW(state["model"].parameters())
    train(state["model"], state["optimizer"], 1024)
    num_bytes = sum(tensor.nbytes for tensor in snapshot(state).values())
    gate, before = CopyGate(monkeypatch), memfd_bytes()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        first = ckpt.save(1)
        assert num_bytes < memfd_bytes() - before <= 1.05 * num_bytes + 100_000
        gate.opened.set()
        first.wait_durable()
        for step in range(2, 6):
            ckpt.save(step).wait_durable()
        assert memfd_bytes() - before <= 1.05 * num_bytes + 100_000, "one arena serves them all"
    assert memfd_bytes() <= before


def test_a_growing_state_does_not_leak_memory_in_either_process(tmp_path: Path) -> None:
    """The smaller arena is forgotten by the trainer, and by the keeper with the next save."""
    state: dict[str, Any] = {"plain": torch.zeros(MIB // 4)}
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.save(1).wait_durable()
        keeper = psutil.Process(keeper_of(ckpt).pid)
        for step, factor in enumerate((2, 3, 4), start=2):
            wait_until(lambda: len(ckpt._components.pipeline.arenas._free) == 1)
            state["plain"] = torch.full((factor * MIB // 4,), float(step))
            ckpt.save(step).wait_durable()
            assert len(ckpt._components.pipeline.arenas.numbers()) == 1
            mapped = [m for m in keeper.memory_maps(grouped=False) if "holdfast-arena" in m.path]
            assert len(mapped) == 1
            check_saved(tmp_path / "home", step, {"plain": state["plain"]})


def test_the_first_save_uses_the_prepared_arena(tmp_path: Path) -> None:
    state = make_state()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.prepare()
        before = ckpt._components.pipeline.arenas.numbers()
        ckpt.save(1)
        assert ckpt._components.pipeline.arenas.numbers() == before == [1]


class Runtime:
    """CUDA's runtime with one answer to every request to page-lock memory."""

    def __init__(self, answer: int) -> None:
        self.answer, self.calls = answer, []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, num_bytes, flags))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


def test_an_arena_is_page_locked_once_and_released_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    monkeypatch.setattr("holdfast.checkpoint.stage.arena._cudart", lambda: runtime)
    made = Arena(1, MIB)
    address = made.bytes.data_ptr()
    made.pin()
    made.pin()
    made.close()
    assert runtime.calls == [("register", address, MIB, 1), ("unregister", address)]


def test_memory_that_cuda_refuses_to_page_lock_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal must not reach the next kernel of the training, and is logged once."""
    runtime, cleared = Runtime(2), []
    monkeypatch.setattr("holdfast.checkpoint.stage.arena._cudart", lambda: runtime)
    monkeypatch.setattr("holdfast.checkpoint.stage.arena._clear_cuda_error", lambda: cleared.append(True))
    made = Arena(1, MIB)
    made.pin()
    made.pin()
    made.close()
    assert [name for name, *_ in runtime.calls] == ["register"]
    assert cleared == [True]
    assert "CUDA refused to page-lock 1.0 MB (cudaHostRegister: error 2)" in capsys.readouterr().err
