"""Host memory: growth is named with its rank before the memory is full, and a steady run is left alone."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.checkpoint.store import open_store
from holdfast.errors import InvalidInput
from holdfast.watch.memory import EVENT, GROWS, MemoryGrowth, MemorySamples, read_used_bytes
from holdfast.watch.report.figures import make_figures
from holdfast.watch.report.summary import read_summary
from making import history_lines
from stage.training import keeper_of, make_checkpointer, wait_until

GB = 10**9


def growth(*used: list[float], left: float = 10.0, total: float = 100.0) -> MemoryGrowth | None:
    """The growth of ranks whose memory in GB is given for each second."""
    samples = MemorySamples()
    for second, row in enumerate(zip(*used, strict=True)):
        samples.add(float(second), {rank: round(one * GB) for rank, one in enumerate(row)})
    return samples.growth(round(left * GB), round(total * GB))


def test_the_rank_that_grows_most_is_named_with_the_time_that_is_left() -> None:
    steady, slow, fast = [5.0] * 30, [5 + 0.1 * i for i in range(30)], [1 + 0.4 * i for i in range(30)]
    found = growth(steady, slow, fast)
    assert found is not None
    assert found.rank == 2
    assert found.bytes_per_s == pytest.approx(0.4 * GB)
    assert found.left_s == pytest.approx(20.0)


@given(st.integers(0, 29), st.floats(1, 50))
def test_one_peak_changes_nothing(at: int, height: float) -> None:
    """Such as a save, which stages a copy."""
    peak = [height if i == at else 0.0 for i in range(30)]
    assert growth([5 + one for one in peak]) is None
    found = growth([5 + 0.2 * i + one for i, one in enumerate(peak)])
    assert found is not None
    assert found.bytes_per_s == pytest.approx(0.2 * GB, rel=0.2)


@pytest.mark.parametrize(
    "used",
    [
        [5.0 + 0.2 * i for i in range(14)],  # too few looks
        [5.0 + 0.001 * i for i in range(60)],  # too little
        [5.0 + (i % 20) for i in range(60)],  # up and down
        [20.0 - 0.2 * i for i in range(60)],
        [5.0 + min(i, 5) for i in range(60)],  # the start of a training
    ],
)
def test_what_is_no_steady_growth_is_not_named(used: list[float]) -> None:
    assert growth(used) is None


def test_a_new_rank_begins_the_samples_anew() -> None:
    samples = MemorySamples()
    for second in range(30):
        samples.add(float(second), {0: second * GB} if second < 20 else {0: second * GB, 1: GB})
    assert len(samples.newest) == 10
    assert samples.growth(GB, GB) is None


def test_the_memory_of_a_process_has_what_it_has_written_and_no_mapped_file(tmp_path: Path) -> None:
    before = read_used_bytes(os.getpid())
    held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never memory freed before
    held.write(bytes(len(held)))
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        grown = read_used_bytes(os.getpid()) - before
    assert len(held) * 0.9 < grown < len(held) + (48 << 20)


def test_a_leak_in_a_real_run_is_warned_of_and_drawn(tmp_path: Path) -> None:
    home, held = tmp_path / "run", list[torch.Tensor]()
    watch = holdfast.HostMemory(within="10h", period="100ms")
    with make_checkpointer(home, {"w": torch.zeros(3)}, watches=[watch]) as ckpt:
        ckpt.save(1).wait_durable()

        def leak() -> bool:
            held.append(torch.ones(1 << 19))
            return len(held) >= 2000 or bool(history_lines(home, GROWS))

        wait_until(leak)
        (line,) = history_lines(home, GROWS)
        wait_until(lambda: keeper_of(ckpt).problems)
        with pytest.warns(holdfast.WatchWarning, match="HOST MEMORY GROWS: rank 0 on"):
            ckpt.save(2)
    assert "grows by" in str(line["detail"])
    assert history_lines(home, EVENT)
    figure = make_figures(read_summary(open_store(home)))["host-memory"]
    assert figure.chart is not None
    assert figure.rows[0][1] == line["detail"]


def test_a_run_without_a_leak_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "run"
    watch = holdfast.HostMemory(within="10h", period="20ms")
    with make_checkpointer(home, {"w": torch.zeros(3)}, watches=[watch]) as ckpt:
        ckpt.save(1).wait_durable()
        wait_until(lambda: len(history_lines(home, EVENT)) >= 5)
    assert history_lines(home, GROWS) == []


@pytest.mark.parametrize("options", [{"action": "grow"}, {"within": "soon"}, {"period": -1}])
def test_values_that_cannot_be_used_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="HostMemory"):
        holdfast.HostMemory(**options)  # pyright: ignore[reportArgumentType]
