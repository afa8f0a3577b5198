"""Whatever is read from outside: only our errors come out, within limits on time and memory.

The corpus has cases that the fuzzer (`make fuzz`) found and cases made by hand for known attacks.
"""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from campaigns.fuzz.bounded import run_case
from campaigns.fuzz.targets import every
from holdfast.checkpoint.format import part
from holdfast.errors import Corrupt

ROOT = Path(__file__).resolve().parents[2]
TARGETS = every()
LONG = ("home-", "dcp", "hf", "torch", "cli", "safetensors")
QUICK = [name for name in TARGETS if not name.startswith(LONG)]


def test_no_case_of_the_corpus_fails_again() -> None:
    """In a process of its own, with limits on its memory."""
    done = subprocess.run(
        [sys.executable, "-m", "campaigns.fuzz.replay"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "cases" in done.stdout


@pytest.mark.parametrize("name", QUICK)
def test_only_our_errors_come_out(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**32), st.integers(0, len(seeds) - 1), st.integers(1, 3))
    def check(seed: int, which: int, num_mutations: int) -> None:
        chance, case = random.Random(seed), seeds[which]
        for _ in range(num_mutations):
            case = target.mutate(case, chance)
        failure = run_case(lambda: target.run(case), memory_bytes=None)
        assert failure is None, failure.text

    check()


def test_an_error_that_is_none_of_ours_is_a_failure() -> None:
    failure = run_case(lambda: [][0])
    assert failure is not None
    assert failure.kind == "IndexError"


@pytest.mark.slow
def test_a_case_that_never_ends_or_takes_all_memory_is_a_failure() -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(_kinds_of_excess) == ["TooLong", "MemoryError", "MemoryError"]


def _kinds_of_excess() -> list[str]:
    def never_end() -> None:
        while True:
            pass

    def hide() -> None:
        try:
            bytearray(1 << 30)
        except MemoryError as error:
            message = "memory ran out"
            raise Corrupt(message) from error

    acts = (never_end, lambda: bytearray(1 << 30), hide)
    failures = [run_case(act, memory_bytes=50 << 20) for act in acts]
    return [failure.kind for failure in failures if failure]


class UncheckedMembers(part._PartMembers, frozen=True, kw_only=True):
    """Members of a part whose integers may be anything."""

    step: Any
    rank: Any
    world_size: Any


@pytest.mark.parametrize("is_planted", [False, True], ids=["as it is", "with a planted fault"])
def test_mutations_find_readers_that_check_no_types(
    monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    """The campaign finds a fault if there is one: here integers of a part are used unchecked."""
    if is_planted:
        monkeypatch.setattr(part, "VERSIONS", replace(part.VERSIONS, types={1: UncheckedMembers}))
    target, chance = TARGETS["part"], random.Random(1)
    seeds = target.seeds()
    cases = (target.mutate(chance.choice(seeds), chance) for _ in range(300))
    found = [run_case(lambda case=case: target.run(case), memory_bytes=None) for case in cases]
    assert any(failure is not None for failure in found) == is_planted
