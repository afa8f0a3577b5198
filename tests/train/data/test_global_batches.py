"""Shuffled batches of any number of samples, and the permutation that orders them."""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from holdfast.errors import InvalidInput, ResumeWarning
from holdfast.train.data import GlobalBatches
from holdfast.train.data.batches import KeyedPermutation
from stage.training import make_checkpointer
from train.data.numbers import Numbers


def ranks_of(num_samples: int, batch: int, world: int, state: Any = None, **options: Any) -> list[Any]:
    """The batches of every rank, at the position of a state."""
    found = []
    for rank in range(world):
        batches = GlobalBatches(num_samples, batch, rank=rank, world_size=world, **options)
        if state is not None:
            batches.load_state_dict(state)
        batches.complete_steps(0)
        found.append(batches)
    return found


def endless(batches: GlobalBatches, ahead: int) -> Iterator[list[int]]:
    """Batches for ever, each drawn some time before it is returned, as by worker processes."""
    while True:
        waiting: list[list[int]] = []
        for batch in batches:
            waiting.append(batch)
            if len(waiting) > ahead:
                yield waiting.pop(0)
        yield from waiting


START = st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 12), st.booleans())


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 90), st.integers(1, 2), st.lists(START, min_size=1, max_size=6))
def test_any_sequence_of_starts_covers_each_unskipped_sample_once_per_epoch(
    num: int, parts: int, starts: list[tuple[int, int, int, bool]]
) -> None:
    """Each start has other ranks, reads ahead, completes some steps, may skip, and crashes."""
    used, skipped, state = list[list[int]](), set[int](), None
    for world, ahead, num_steps, skips in starts:
        ranks = ranks_of(num, 8, world, state, accumulation_steps=parts)
        streams = [endless(one, ahead) for one in ranks]
        for _ in range(num_steps):
            before = ranks[0].position
            shares = [next(stream) for stream in streams for _ in range(parts)]
            for one in ranks:
                one.complete_steps(1)
            used.append(sorted(itertools.chain(*shares)))
            assert len({one.position for one in ranks}) == 1
            assert ranks[0].position > before
        state = ranks[0].state_dict()
        if skips:  # after a restore, as a rollback does
            (restored,) = ranks_of(num, 8, 1, state)
            start = restored.position
            restored.skip(start, start + 5)
            skipped |= set(range(start, start + 5))
            state = restored.state_dict()
    dropped = ranks_of(num, 8, 1, state)[0].position  # of the epochs passed
    order = [index for epoch in range(dropped // num + 1) for index in order_of(num, epoch)]
    expected = Counter(order[place] for place in range(dropped) if place not in skipped)
    found = Counter(itertools.chain(*used))
    lost = expected - found
    assert not found - expected, "a sample was used twice"
    assert lost.total() <= 8 * (dropped // num)  # ends of epochs with fewer samples than shares


def order_of(num: int, epoch: int) -> list[int]:
    batches = GlobalBatches(num, 1, rank=0, world_size=1)
    return [index for _ in range(epoch + 1) for index in itertools.chain(*list(batches))][epoch * num :]


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 60), st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 9)), max_size=5))
def test_steps_see_the_same_samples_whatever_the_ranks(num: int, starts: list[tuple[int, int]]) -> None:
    whole = (sorted(one) for one in endless(GlobalBatches(num * 8, 8, rank=0, world_size=1), 0))
    state = None
    for world, num_steps in starts:
        ranks = ranks_of(num * 8, 8, world, state)
        streams = [endless(one, 3) for one in ranks]
        for _ in range(num_steps):
            assert sorted(itertools.chain(*(next(one) for one in streams))) == next(whole)
            for one in ranks:
                one.complete_steps(1)
        state = ranks[0].state_dict()


def test_a_live_iterator_continues_after_a_rollback_and_no_sample_is_used_twice() -> None:
    batches = ranks_of(100, 10, 1)[0]
    stream = endless(batches, 3)
    seen = list[int]()

    def step() -> None:
        seen.extend(next(stream))
        batches.complete_steps(1)

    step()
    old = batches.state_dict()
    for _ in range(4):
        step()
    position = batches.position
    batches.load_state_dict(old)
    assert batches.position == 10
    batches.skip(batches.position, position)
    assert (batches.position, batches.skipped) == (50, ((10, 50),))
    for _ in range(5):
        step()
    assert sorted(seen) == list(range(100))
    assert batches.position == 100
    again = ranks_of(100, 10, 2, batches.state_dict())
    assert again[0].skipped == ((10, 50),)


def test_an_iterator_that_has_read_ahead_before_the_restore_is_refused() -> None:
    batches = GlobalBatches(100, 10)
    stream = iter(batches)
    next(stream)
    batches.load_state_dict({**batches.state_dict(), "taken": 50})
    with pytest.raises(InvalidInput, match="iterator of the data loader after the restore"):
        next(stream)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_with_workers_resumes_where_completed_steps_were(tmp_path: Path, num_workers: int) -> None:
    def train(total: int) -> list[list[int]]:
        batches = GlobalBatches(50, 8)
        loader = DataLoader(Numbers(50), batch_sampler=batches, num_workers=num_workers)
        found = list[list[int]]()
        with make_checkpointer(tmp_path / "run", {"batches": batches}, every=4) as ckpt:
            stream = itertools.chain.from_iterable(loader for _ in itertools.count())
            found.extend(next(stream).tolist() for _ in ckpt.steps(total))
        return found

    expected = list(itertools.islice(endless(GlobalBatches(50, 8), 0), 18))
    assert train(5) == expected[:5]
    assert train(18) == expected[5:]


def test_steps_that_use_more_batches_than_they_count_are_noticed(tmp_path: Path) -> None:
    batches = GlobalBatches(2000, 4)
    loader = DataLoader(Numbers(2000), batch_sampler=batches)

    def train() -> None:
        with make_checkpointer(tmp_path, {"batches": batches}, every=20) as ckpt:
            stream = iter(loader)
            for _ in ckpt.steps(20):
                for _ in range(4):
                    next(stream)

    with pytest.warns(ResumeWarning, match="returned 80 batches of this epoch, and the completed steps"):
        train()


def test_batches_that_are_not_in_the_state_are_noticed(tmp_path: Path) -> None:
    gc.collect()
    stream = iter(DataLoader(Numbers(20), batch_sampler=GlobalBatches(20, 4)))
    next(stream)
    made = make_checkpointer(tmp_path, {"numbers": torch.zeros(2)})
    with made as ckpt, pytest.warns(ResumeWarning, match="GlobalBatches that is not in the state"):
        ckpt.save(1)


def test_an_evaluation_does_not_warn_and_a_later_epoch_does(tmp_path: Path) -> None:
    gc.collect()
    with make_checkpointer(tmp_path, {"numbers": torch.zeros(2)}, every=1) as ckpt:
        with ckpt.phase("eval"):
            evaluation = iter(DataLoader(Numbers(20), shuffle=True))
            next(evaluation)
        ended = iter(DataLoader(Numbers(2), shuffle=True))
        list(ended)
        ckpt.save(1)
        reading = iter(DataLoader(Numbers(20), shuffle=True))
        next(reading)
        with pytest.warns(ResumeWarning, match="shuffled DataLoader over Numbers is being read"):
            ckpt.save(2)
        ckpt.save(3)
    del evaluation, ended, reading


def test_the_size_of_the_data_does_not_matter() -> None:
    batches = GlobalBatches(10**9, 64)
    first = next(iter(batches))
    assert len(set(first)) == 64
    assert max(first) > 10**8


SPECIAL = [1, 2, 3, 4, 5, 7, 8, 9, 97, 127, 128, 129, 1009, 4095, 4096, 4097, 65_537]


def image(length: int, key: bytes) -> list[int]:
    return KeyedPermutation(length, key)(torch.arange(length)).tolist()


def chi_squared(counts: list[int], expected: float) -> float:
    """How many standard deviations the statistic is above its mean."""
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    return (statistic - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))


@given(st.one_of(st.sampled_from(SPECIAL), st.integers(1, 5000)), st.binary(max_size=20))
def test_each_number_occurs_once(length: int, key: bytes) -> None:
    assert sorted(image(length, key)) == list(range(length))


@given(st.integers(1, 2**62), st.binary(max_size=8), st.data())
def test_numbers_of_any_size_stay_below_the_length_and_differ(
    length: int, key: bytes, data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    images = KeyedPermutation(length, key)(torch.tensor(numbers)).tolist()
    assert len(set(images)) == len(numbers)
    assert all(0 <= one < length for one in images)


def test_the_order_of_this_version_is_that_of_all_versions() -> None:
    """Checkpoints depend on it: a change would repeat and leave out samples."""
    assert image(10, b"0/0") == [1, 3, 5, 6, 8, 2, 0, 4, 7, 9]
    images = KeyedPermutation(10**9, b"7/3")(torch.tensor([0, 1, 10**9 - 1])).tolist()
    assert images == [37088425, 438451775, 810947518]


@pytest.mark.parametrize("length", [2, 3, 4])
def test_all_orders_of_a_few_numbers_are_equally_frequent(length: int) -> None:
    num_keys = 100 * math.factorial(length)
    counts = Counter(tuple(image(length, str(key).encode())) for key in range(num_keys))
    found = [counts[one] for one in itertools.permutations(range(length))]
    assert abs(chi_squared(found, 100)) < 5


@pytest.mark.parametrize("length", [1000, 4096, 10_007])
def test_places_and_images_are_independent(length: int) -> None:
    """Counts of (tenth of places, tenth of images), and of distances between neighbours, over 20 keys."""
    cells, steps = Counter[tuple[int, int]](), Counter[int]()
    for key in range(20):
        images = KeyedPermutation(length, str(key).encode())(torch.arange(length))
        places = torch.arange(length) * 10 // length
        cells.update(zip(places.tolist(), (images * 10 // length).tolist(), strict=True))
        steps.update(((images.diff() % length) * 16 // length).tolist())
    assert abs(chi_squared([cells[row, column] for row in range(10) for column in range(10)], length / 5)) < 6
    assert chi_squared([steps[one] for one in range(16)], 20 * (length - 1) / 16) < 6


def test_neighbouring_keys_give_unrelated_orders() -> None:
    first, second = image(5000, b"0/0"), image(5000, b"0/1")
    num_equal = sum(one == other for one, other in zip(first, second, strict=True))
    assert num_equal < 10  # one is expected
    coefficient = torch.corrcoef(torch.tensor([first, second], dtype=torch.float64))[0, 1]
    assert abs(float(coefficient)) < 0.06
