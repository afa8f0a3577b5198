"""Causes of failed attempts: compared without what varies, and never confused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.jobs.outcome import MAX_SAME, FailureCause, Outcome, Phase, find_cause, is_same, max_same

FAILED = {0: Outcome(Phase.RUN, code=1)}
IMPORT_ERROR = """\
Traceback (most recent call last):
  File "/home/ann/.local/state/holdfast/jobs/7/nodes/0/workdir/train.py", line 3, in <module>
    import flash_atn
ModuleNotFoundError: No module named 'flash_atn'
"""
OUT_OF_MEMORY = """\
2026-11-25 {time} INFO step {step} loss {loss}
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/tmp/tmp{word}/train.py", line 88, in <module>
[rank{rank}]:     loss.backward()
[rank{rank}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size} MiB. GPU {rank} has \
a total capacity of 79.15 GiB of which {size} MiB is free. Process {pid} has 78.9 GiB memory in use.
"""


def cause(text: str, code: int = 1, phase: Phase = Phase.RUN) -> FailureCause:
    """Return the cause of a text."""
    found = find_cause({0: Outcome(phase, code=code)}, text.splitlines())
    assert found is not None
    return found


def out_of_memory(seed: int, step: int) -> str:
    """Return the output of two ranks out of memory, in any order."""
    draw = random.Random(seed)
    facts = {
        "time": f"{draw.randrange(24):02}:{draw.randrange(60):02}:01,{draw.randrange(1000):03}",
        "loss": draw.random(),
        "size": draw.randrange(2, 900),
        "word": f"{draw.randrange(1 << 40):010x}",
        "pid": draw.randrange(2, 1 << 22),
    }
    ranks = [OUT_OF_MEMORY.format(rank=rank, step=step, **facts) for rank in range(2)]
    draw.shuffle(ranks)
    return "".join(ranks)


@given(st.integers(), st.integers(), st.integers(0, 10**6))
def test_errors_that_differ_only_in_numbers_and_places_are_the_same_at_the_same_step(
    one: int, other: int, step: int
) -> None:
    before, now = cause(out_of_memory(one, step)), cause(out_of_memory(other, step))
    assert is_same(before, now, at_same_step=True)


def test_the_cause_names_the_error_and_not_its_frame() -> None:
    assert cause(IMPORT_ERROR).what == "ModuleNotFoundError: No module named 'flash_atn'"
    assert cause(out_of_memory(1, 2)).what.startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert cause("loading\nno such data set\n").what == "no such data set"


def test_without_known_steps_the_numbers_count_too() -> None:
    at_10, at_20 = (cause(f"step {step}\nAssertionError: loss is nan\n") for step in (10, 20))
    assert is_same(at_10, at_20, at_same_step=True)
    assert not is_same(at_10, at_20, at_same_step=False)
    assert is_same(cause(IMPORT_ERROR), cause(IMPORT_ERROR.replace("jobs/7", "jobs/9")), at_same_step=False)


@pytest.mark.parametrize(
    "other",
    [
        *(cause(IMPORT_ERROR.replace(*two)) for two in (("flash_atn", "apex"), ("ModuleNotFound", "Import"))),
        *(cause(IMPORT_ERROR.replace("train.py", "eval.py")), cause(IMPORT_ERROR + "Killed\n")),
        *(cause(IMPORT_ERROR, code=2), cause(IMPORT_ERROR, phase=Phase.SETUP)),
    ],
)
def test_another_error_status_or_phase_is_not_the_same(other: FailureCause) -> None:
    assert not is_same(cause(IMPORT_ERROR), other, at_same_step=True)


def test_an_attempt_without_output_has_no_cause() -> None:
    assert find_cause(FAILED, ["", "\x1b[0m  "]) is None
    assert not is_same(None, None, at_same_step=True)


def test_progress_bars_do_not_count() -> None:
    bars = [f"{n}%|{'#' * n}| {n}/99 [00:0{n}<00:09, {n}.1it/s]" for n in range(5)]
    assert find_cause(FAILED, [*bars, "ValueError: x"]) == find_cause(FAILED, ["ValueError: x"])


def test_the_headline_has_no_secrets() -> None:
    found = cause("OSError: https://ann:hunter2@host/bucket?token=abc123 is not there\n")
    assert "hunter2" not in found.what
    assert "abc123" not in found.what


@given(st.lists(st.text(max_size=200), max_size=30))
def test_any_output_has_a_cause_of_limited_size(lines: list[str]) -> None:
    found = find_cause(FAILED, lines)
    assert found is None or (len(found.what) <= 200 and len(found.key) == 32)


@pytest.mark.parametrize(
    ("text", "limit"),
    [("", MAX_SAME), ("any", 0), ("5", 5), ("0", MAX_SAME), ("x", MAX_SAME), ("²", MAX_SAME)],
)
def test_the_limit_is_a_variable_of_the_job(text: str, limit: int) -> None:
    assert max_same({"HOLDFAST_SAME_FAILURES": text}) == limit
    assert max_same({}) == MAX_SAME
