"""fit_batch finds the true largest batch and changes nothing; its search and scaling rules."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.errors import InvalidInput
from holdfast.train.batch import BatchFit, Probe
from holdfast.train.batch.finder import Search, find_memory_limit
from holdfast.train.batch.result import choose_size, plan_accumulation, scaled_rates
from holdfast.train.batch.training_step import (
    StepBenchmark,
    batch_size_of,
    collect_training_state,
    resize,
)
from stage.training import make_checkpointer
from train.batch.training import PEAK_LIMIT, Training

CPU = torch.device("cpu")


def real_peak(training: Training, size: int) -> int:
    """Return the bytes of tensors at the peak of real steps."""
    state = collect_training_state(training.state)
    peak = StepBenchmark(training.step, training.batch_of, state, CPU, 0).measure_peak(size)
    assert peak is not None
    return peak


@pytest.mark.parametrize("warm", [False, True])
def test_the_largest_batch_is_found_and_nothing_is_changed(
    warm: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fits, and 5 % more would not."""
    training = Training(warm=warm)
    before, parameters = training.fingerprint(), list(training.model.parameters())
    found = training.fit(memory_limit=PEAK_LIMIT, tuned_batch_size=5000)
    assert training.fingerprint() == before
    assert [id(p) for p in training.model.parameters()] == [id(p) for p in parameters]
    assert training.sample["note"] == "kept"
    assert found.size <= found.largest
    printed = capsys.readouterr().err
    assert "chosen" in printed
    assert "by the linear rule, for SGD (Goyal et al. 2017" in printed
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9 ** (2 * warm))
    assert real_peak(training, found.largest) <= PEAK_LIMIT < real_peak(training, int(found.largest * 1.05))


def test_a_resumed_run_does_not_search_again(tmp_path: Path) -> None:
    def saved(training: Training) -> dict[str, Any]:
        return {name: getattr(training, name) for name in ("model", "optimizer", "scheduler")}

    training, found = Training(), holdfast.BatchFit()
    with make_checkpointer(tmp_path, {**saved(training), "batch": found}, every=5) as ckpt:
        assert ckpt.restore() is None
        training.fit(memory_limit="4MB", result=found, quiet=True)
        for _ in ckpt.steps(3):
            training.step(training.batch_of(found.size))
    resumed, kept = Training(), holdfast.BatchFit()
    with make_checkpointer(tmp_path, {**saved(resumed), "batch": kept}, every=5) as ckpt:
        assert ckpt.restore() == 3
        num_steps = resumed.num_steps
        again = resumed.fit(memory_limit=1, result=kept)
    assert again is kept
    assert resumed.num_steps == num_steps
    assert kept.state_dict() == found.state_dict()


def test_if_the_smallest_batch_does_not_fit_the_error_gives_its_peak() -> None:
    training = Training()
    before = training.fingerprint()
    with pytest.raises(InvalidInput, match=r"Not even a batch of 2 fits in 100 kB .*peak is \d{3} kB"):
        training.fit(memory_limit="100kB")
    assert training.fingerprint() == before


def test_memory_that_runs_out_bounds_the_search_and_another_failure_ends_it_unchanged() -> None:
    training = Training()
    before = training.fingerprint()

    def fail(batch: dict[str, Any]) -> None:
        training.step(batch)
        if len(batch["x"]) >= 32:
            raise ValueError("too wide")

    def run_out(batch: dict[str, Any]) -> None:
        if len(batch["x"]) > 50:  # as with a device's allocator: the step raises in the middle
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        training.step(batch)

    with pytest.raises(ValueError, match="too wide"):
        holdfast.fit_batch(fail, training.sample, training.state, memory_limit=PEAK_LIMIT)
    assert training.fingerprint() == before
    found = holdfast.fit_batch(run_out, training.sample, training.state, quiet=True)
    assert found.largest in (48, 49, 50)
    assert training.fingerprint() == before


def test_sizes_with_longer_steps_are_skipped() -> None:
    training = Training()

    def step(batch: dict[str, Any]) -> None:
        training.step(batch)
        time.sleep(len(batch["x"]) * 1e-3)

    found = holdfast.fit_batch(step, training.sample, training.state, max_step_time="20ms", quiet=True)
    assert 2 <= found.largest < 20


def test_a_state_that_cannot_be_restored_is_rejected() -> None:
    training = Training()
    with pytest.raises(InvalidInput, match=r"\['Training'\] types without state_dict"):
        holdfast.fit_batch(training.step, training.sample, {**training.state, "all": training})
    with pytest.raises(InvalidInput, match="0 modules"):
        holdfast.fit_batch(training.step, training.sample, {"optimizer": training.optimizer})


def test_the_global_batch_is_kept_by_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    found = training.fit(memory_limit="2.2MB", max_size=64, global_batch_size=1024)
    num = -(-1024 // found.size)
    printed = capsys.readouterr().err
    assert f"to keep a global batch of 1024: accumulate {num} micro-batches of at most" in printed


def test_ranks_on_one_host_share_its_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = find_memory_limit(CPU, 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = find_memory_limit(CPU, 0)
    assert 0 < shared < alone / 2


def test_batches_are_cut_and_repeated_along_the_first_dimension() -> None:
    sample = {"x": torch.arange(6).view(3, 2), "y": (torch.arange(3), 7), "scale": torch.tensor(2.0)}
    assert batch_size_of(sample) == 3
    larger, smaller = resize(sample, 7), resize(sample, 2)
    assert larger["x"][:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert larger["y"][0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert smaller["x"].tolist() == [[0, 1], [2, 3]]
    assert smaller["y"][1] == 7
    assert smaller["scale"] == 2.0
    with pytest.raises(InvalidInput, match=r"first dimensions of \[2, 3\]"):
        batch_size_of([torch.zeros(2), torch.zeros(3)])


@pytest.mark.gpu
def test_a_device_is_filled_up_to_its_limit() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    sample = torch.randn(8, 1024, device=device)
    found = holdfast.fit_batch(
        step, sample, {"model": model, "optimizer": optimizer}, memory_limit="1GiB", max_size=10**6
    )
    assert not optimizer.state
    peaks = {}
    for share in (1.0, 1.1):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step(resize(sample, int(found.largest * share)))
        peaks[share] = torch.cuda.max_memory_reserved()
    assert peaks[1.0] <= 2**30 < peaks[1.1]


def largest_found(peak: Callable[[int], int], limit: int, **options: int) -> tuple[Search, list[int]]:
    """Return a complete search, and the sizes that it tried."""
    search, tried = Search(**options), []
    while (size := search.next()) is not None:
        tried.append(size)
        search.record(size, limit - peak(size))
        assert len(tried) < 40
    return search, tried


def true_largest(peak: Callable[[int], int], limit: int, max_size: int) -> int:
    return max((size for size in range(1, max_size + 1) if peak(size) <= limit), default=0)


@given(
    floor=st.integers(0, 10**6),
    base=st.integers(0, 10**5),
    slope=st.integers(1, 10**4),
    grain=st.sampled_from([1, 512, 20_000]),
    limit=st.integers(1, 10**7),
)
def test_the_result_fits_and_is_nearly_the_largest(
    floor: int, base: int, slope: int, grain: int, limit: int
) -> None:
    """Memory as in training: a floor from the optimizer, then a line, in steps of the allocator."""

    def peak(size: int) -> int:
        return -(-max(floor, base + slope * size) // grain) * grain

    truth = true_largest(peak, limit, 1000)
    search, tried = largest_found(peak, limit, max_size=1000)
    assert search.largest == truth == 0 or peak(search.largest) <= limit
    assert search.largest <= truth <= max(search.largest * 1.05, search.largest + grain // slope + 1)
    assert len(tried) == len(set(tried))
    assert len(tried) <= 25


@given(st.integers(0, 10**5), st.integers(100, 10**4), st.integers(10, 1000))
def test_if_memory_is_linear_no_size_is_tried_that_does_not_fit(base: int, slope: int, truth: int) -> None:
    limit = base + slope * truth
    search, tried = largest_found(lambda size: base + slope * size, limit, max_size=10**6)
    assert all(size <= truth for size in tried)
    assert search.largest >= truth / 1.03 - 1
    assert len(tried) <= 9


def test_no_size_below_the_minimum_or_above_the_maximum_is_tried() -> None:
    search, tried = largest_found(lambda size: 100 * size, 150, min_size=2)
    assert (search.largest, tried) == (0, [2])
    search, tried = largest_found(lambda size: size, 10**9, max_size=300)
    assert search.largest >= 300 / 1.03
    assert max(tried) <= 300


def test_the_rule_for_the_optimizer_comes_first() -> None:
    lines = scaled_rates(0.1, 16, 64, optimizer="AdamW")
    assert lines[0].startswith("0.2 by the square root rule")
    assert lines[1].startswith("0.4 by the linear rule")
    assert "Malladi et al. 2022" in lines[0]
    assert "Goyal et al. 2017" in lines[1]
    assert scaled_rates(0.1, 16, 64, optimizer="SGD") == lines[::-1]


@given(st.floats(1e-6, 10), st.integers(1, 10**5), st.integers(1, 10**5))
def test_scaling_there_and_back_gives_the_first_rate(rate: float, here: int, there: int) -> None:
    for rule in (0, 1):
        scaled = float(scaled_rates(rate, here, there, optimizer="")[rule].split()[0])
        back = float(scaled_rates(scaled, there, here, optimizer="")[rule].split()[0])
        assert math.isclose(back, rate, rel_tol=0.02)  # both are printed with three digits


@pytest.mark.parametrize("sizes", [{"tuned_batch_size": -1}, {"global_batch_size": -1}])
def test_a_batch_without_a_sample_is_rejected(sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="at least one sample for every rank"):
        Training().fit(**sizes)


@given(st.integers(1, 10**4), st.integers(1, 500), st.integers(1, 64))
def test_accumulation_reaches_the_global_batch_with_micro_batches_that_fit(
    total: int, size: int, world: int
) -> None:
    num_micro_batches, micro_batch_size = plan_accumulation(total, size, world)
    assert micro_batch_size <= size
    assert micro_batch_size * num_micro_batches * world >= total
    assert (num_micro_batches - 1) * size * world < total  # one micro-batch less would not suffice


def test_the_smallest_size_within_three_percent_of_the_best_is_chosen() -> None:
    times = {1: 1.0, 8: 1.25, 16: 2.25, 32: 4.4, 64: 9.0}  # 1, 6.4, 7.11, 7.27, 7.11 samples per second
    probes = [Probe(size, None, True, step_s) for size, step_s in times.items()]
    assert choose_size(probes) == 16
    assert choose_size([*probes, Probe(128, None, False, 1.0)]) == 16
    with pytest.raises(InvalidInput, match="Cannot choose a batch size"):
        choose_size([Probe(1, 1, True)])


def test_a_result_survives_its_state_dict() -> None:
    result = BatchFit()
    assert not result
    assert str(result) == "no batch size found yet"
    result.size, result.largest, result.limit_bytes = 16, 40, 10**9
    result.probes = (Probe(16, 4 * 10**8, True, 0.5), Probe(41, None, False))
    again = BatchFit()
    again.load_state_dict(result.state_dict())
    assert again
    assert again.state_dict() == result.state_dict()
    assert str(again).splitlines()[1].split() == ["16", "400", "MB", "500.0", "ms", "32", "<-", "chosen"]
    assert "does not fit" in str(again)
