"""fit_batch finds the true largest batch and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidInput, Unsupported
from holdfast.train.batch import estimate_peak
from holdfast.train.batch.finder import find_memory_limit
from holdfast.train.batch.step_cost import StepBenchmark, batch_size_of, resize
from holdfast.train.batch.training_state import collect_training_state
from stage.training import make_checkpointer
from train.batch.training import PEAK_LIMIT, Training

CPU = torch.device("cpu")


def real_peak(training: Training, size: int) -> int:
    """Return the bytes of tensors at the peak of real steps."""
    state = collect_training_state(training.state)
    peak = StepBenchmark(training.step, training.batch_of, state, CPU, 0).measure_peak(size)
    assert peak is not None
    return peak


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_the_largest_batch_is_found_and_nothing_is_changed(
    reads: bool, warm: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Estimated, or with real steps where a value is read: it fits, and 5 % more would not."""
    training = Training(reads=reads, warm=warm)
    before, parameters = training.fingerprint(), list(training.model.parameters())
    found = training.fit(memory_limit=PEAK_LIMIT, tuned_batch_size=5000)
    assert training.fingerprint() == before
    assert [id(p) for p in training.model.parameters()] == [id(p) for p in parameters]
    assert training.sample["note"] == "kept"
    assert found.size <= found.largest
    assert ("DataDependentOutputException" in found.note) == reads
    printed = capsys.readouterr().err
    assert "chosen" in printed
    assert "by the linear rule, for SGD (Goyal et al. 2017" in printed
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9 ** (2 * warm))
    assert real_peak(training, found.largest) <= PEAK_LIMIT < real_peak(training, int(found.largest * 1.05))


@pytest.mark.parametrize("size", [4, 64, 300])
def test_the_estimate_matches_the_real_peak(size: int) -> None:
    training = Training(warm=False)
    before = [value for value in training.fingerprint() if isinstance(value, bytes)]
    state = collect_training_state(training.state)
    estimated = estimate_peak(training.step, training.batch_of, state, size)
    # The scheduler did step: only `fit_batch` restores that.
    assert training.optimizer.param_groups[0]["lr"] < 1e-3
    assert [value for value in training.fingerprint() if isinstance(value, bytes)] == before
    assert estimated == pytest.approx(real_peak(training, size), rel=0.01)


def test_a_part_that_two_modules_share_is_estimated_once() -> None:
    """As the encoder of an actor and a critic."""
    shared = nn.Linear(512, 512)
    actor, critic = nn.Sequential(shared, nn.Linear(512, 1)), nn.Sequential(shared, nn.Linear(512, 1))
    both = nn.ModuleList([actor, critic])
    optimizer = torch.optim.Adam(both.parameters())

    def step(batch: torch.Tensor) -> None:
        (actor(batch).sum() + critic(batch).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    peaks = [
        estimate_peak(step, lambda size: torch.ones(size, 512), collect_training_state(state), 4)
        for state in ([actor, critic, optimizer], [both, optimizer])
    ]
    assert peaks[0] == peaks[1]


def test_a_step_that_reads_a_value_cannot_be_estimated() -> None:
    training = Training(reads=True)
    state = collect_training_state(training.state)
    with pytest.raises(Unsupported, match="DataDependentOutputException"):
        estimate_peak(training.step, training.batch_of, state, 8)
    assert all(type(parameter) is nn.Parameter for parameter in training.model.parameters())


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
    training = Training(reads=True)
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


def test_ranks_on_one_host_share_its_available_memory() -> None:
    alone, shared = (find_memory_limit(CPU, 0, num_sharing=num) for num in (1, 4))
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
