"""The GPT example: its batches and its loss are the same on any number of ranks, also after kills."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.running import EXAMPLES, run_on
from holdfast.checkpoint.store import open_store
from holdfast.train.data import GlobalBatches
from holdfast.watch.report.summary import read_summary

FOLDER = EXAMPLES / "gpt"
STEPS = 18
SMALL = ("--steps", STEPS, "--every", 5, "--batch", 8, "--length", 64, "--bytes", 60_000)


def load(name: str) -> ModuleType:
    """A file of the example, under a name that nothing else has."""
    spec = importlib.util.spec_from_file_location(f"example_gpt_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


source = load("source")
LINES = st.sampled_from(
    [b"def f():\n", b"    def g(self):\n", b"class C:\n", b"    x = 1\n", b"\n", b"@a\n", b"\xff"]
)


@given(st.lists(LINES).map(b"".join), st.integers(2, 40))
def test_sequences_have_every_byte_once_and_are_not_too_long(text: bytes, max_tokens: int) -> None:
    found = source.split_source(text, max_tokens)
    assert b"".join(bytes(tokens[1:].tolist()) for tokens in found) == text
    assert all(2 <= len(tokens) <= max_tokens and tokens[0] == source.BEGIN for tokens in found)


def test_each_function_and_class_begins_a_sequence() -> None:
    starts = [b"import os\n\n", b"class C:\n", b"    @wraps\n", b"    def f(self):\n        pass\n\n\n"]
    starts.append(b"async def g():\n    pass\n")
    found = source.split_source(b"".join(starts), 100)
    assert [bytes(tokens[1:].tolist()) for tokens in found] == starts


def test_the_library_is_read_up_to_a_size(tmp_path: Path) -> None:
    for name in ("b.py", "a.py"):
        (tmp_path / name).write_text(f"{name[0]} = 1\n" * 10)
    (tmp_path / "note.txt").write_text("no module")
    found = source.library(200, 80, tmp_path)
    assert b"".join(bytes(one[1:].tolist()) for one in found) == b"a = 1\n" * 10 + b"b = 1\n" * 3 + b"b "
    assert all(len(one) <= 64 for one in source.library(64, 20_000))


def test_a_row_small_enough_to_read() -> None:
    row = source.join([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], 7)
    assert {name: one.tolist() for name, one in row.items()} == {
        "input_ids": [5, 6, 7, 8, 9, 0, 0],
        "position_ids": [0, 1, 2, 0, 1, 0, 1],
        "sequence_ids": [0, 0, 0, 1, 1, -1, -1],
    }


def test_packed_rows_are_nearly_full_and_have_every_sequence_once() -> None:
    texts = source.library(128, 60_000)
    rows = source.pack(texts, 128)
    found = [
        tuple(row["input_ids"][row["sequence_ids"] == number].tolist())
        for row in rows
        for number in range(int(row["sequence_ids"].max()) + 1)
    ]
    assert sorted(found) == sorted(tuple(text.tolist()) for text in texts)
    assert {len(one) for row in rows for one in row.values()} == {128}
    assert sum(map(len, texts)) > 0.95 * 128 * len(rows)


def test_a_batch_has_the_same_rows_on_any_number_of_ranks() -> None:
    num_rows = len(source.pack(source.library(128, 60_000), 128))

    def first(world_size: int) -> list[set[int]]:
        ranks = [
            iter(GlobalBatches(num_rows, 8, drop_last=True, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        return [{row for rank in ranks for row in next(rank)} for _ in range(5)]

    assert first(1) == first(2) == first(4)
    assert all(len(batch) == 8 for batch in first(4))


def test_sequences_do_not_attend_to_each_other_and_padding_is_ignored() -> None:
    torch.manual_seed(0)
    model = load("model").Gpt(source.VOCABULARY, 32, width=16, heads=2, layers=2)
    texts = [torch.tensor([source.BEGIN, *text]) for text in (b"def f(): pass", b"x = 1")]

    def loss_of(*sequences: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss, count = model({name: one[None] for name, one in source.join(sequences, 32).items()})
        return loss, int(count)

    together, count = loss_of(*texts)
    apart = [loss_of(text) for text in texts]
    assert count == sum(number for _, number in apart) == 18
    torch.testing.assert_close(together, apart[0][0] + apart[1][0])


def start(home: Path, ranks: int, *options: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Train on so many ranks, to the end if nothing happens."""
    given = {
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_TRUST_HOMES": str(home),
        "TMPDIR": str(home.parent),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    return run_on(ranks, FOLDER / "train.py", "--home", home, *SMALL, *options, **given, **env)


def losses(home: Path) -> dict[int, float]:
    """The loss of each step, of the attempts that count."""
    (curve,) = [one for one in read_summary(open_store(str(home))).curves if one.name == "loss"]
    return {point.step: point.value for point in curve.counted}


@pytest.mark.slow
@pytest.mark.ranks
def test_killed_on_two_ranks_and_resumed_on_four_and_one_the_loss_continues(
    tmp_path: Path,
) -> None:
    straight, home = tmp_path / "straight", tmp_path / "home"
    done = start(straight, 1, "--eager")
    assert done.returncode == 0, done.stderr
    expected = losses(straight)
    assert list(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < 0.8 * expected[1]
    mark = tmp_path / "mark"
    killed = start(home, 2, HOLDFAST_KILL_AT="trainer.handed:2", HOLDFAST_KILL_MARK=str(mark))
    assert killed.returncode != 0
    assert mark.exists()
    preempted = start(
        home, 4, "--eager", HOLDFAST_KILL_AT="trainer.handed:1", HOLDFAST_KILL_MARK=str(tmp_path / "second")
    )
    assert preempted.returncode != 0
    assert "restored step" in preempted.stderr
    last = start(home, 1, "--eager")
    assert last.returncode == 0, last.stderr
    assert "restored step" in last.stderr
    found = losses(home)
    assert list(found) == list(expected)
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=2e-3), step
