"""Verification: every kind of damage is found and named, and all of it at once."""

import random

import torch

from holdfast.checkpoint.format import names
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.store.memory import MemoryStore
from making import flip, make_checkpoint, make_home

RANKS = [{"a": torch.randn(5000), "c": torch.randn(3000)}, {"b": torch.randn(4000), "d": torch.ones(())}]


def make_store() -> MemoryStore:
    store = MemoryStore()
    make_home(store)
    make_checkpoint(store, 5, 1, RANKS, values=[{"x": 1}, {"x": 2}], chunk_bytes=4096)
    return store


def test_a_whole_checkpoint_is_good_and_all_of_it_is_read() -> None:
    store = make_store()
    opened = open_checkpoint(store)
    seen: list[int] = []
    report = opened.verify(on_bytes=seen.append, num_threads=2)
    assert report.is_good
    assert report.problems == report.extra == ()
    assert report.num_bytes == sum(seen) == opened.manifest.data_bytes
    assert report.num_files == 5


def test_a_flipped_bit_anywhere_in_any_file_is_found() -> None:
    store = make_store()
    opened = open_checkpoint(store)
    dice = random.Random(7)
    files = list(store.list("step-"))
    assert len(files) == 5
    for entry in files:
        good = store.get(entry.name)
        for position in {0, 7, 8, len(good) - 1, *(dice.randrange(len(good)) for _ in range(60))}:
            bad = bytearray(good)
            bad[position] ^= 1 << dice.randrange(8)
            store.put(entry.name, bad)
            report = open_checkpoint(store).verify() if "manifest" not in entry.name else opened.verify()
            assert [problem.kind for problem in report.problems] == ["corrupt"], (entry.name, position)
            assert entry.name in report.problems[0].message
        store.put(entry.name, good)
    assert opened.verify().is_good


def test_a_truncated_file_is_one_problem_and_the_rest_is_still_checked() -> None:
    store = make_store()
    name = names.data(5, 1, 1)
    flip(store, name, 4096)
    store.put(name, store.get(name)[:-5000])
    messages = [problem.message for problem in open_checkpoint(store).verify().problems]
    assert len(messages) == 2
    assert any("truncated" in message for message in messages)
    assert any("chunk 1 " in message for message in messages)


def test_all_problems_of_all_ranks_are_collected() -> None:
    store = make_store()
    opened = open_checkpoint(store)
    store.delete(names.data(5, 1, 0))
    store.delete(names.part(5, 1, 1))
    store.put(names.manifest(5, 1), b"gone bad")
    problems = opened.verify().problems
    assert {(problem.kind, problem.key) for problem in problems} == {
        ("corrupt", names.manifest(5, 1)),
        ("not-found", names.part(5, 1, 1)),
        ("not-found", names.data(5, 1, 0)),
    }
    assert len(problems) == 3


def test_extra_files_are_noted_and_harmless() -> None:
    store = make_store()
    make_checkpoint(store, 5, 2, RANKS)
    store.put("step-00000005/notes.txt", b"mine")
    beside = [names.data(5, 1, 7), names.frozen(5, 1, 0)]  # of a rank, and of frozen tensors, that it lacks
    for name in beside:
        store.put(name, b"from where?")
    report = open_checkpoint(store, 5, attempt=1).verify()
    assert report.is_good
    assert report.extra == tuple(sorted(["step-00000005/notes.txt", *beside]))


def test_every_byte_of_an_empty_checkpoint_is_verified_too() -> None:
    store = MemoryStore()
    make_checkpoint(store, 1, 1, [{}])
    report = open_checkpoint(store).verify()
    assert report.is_good
    assert report.num_bytes > 0


def test_damage_in_a_file_of_frozen_tensors_is_named_with_its_file_and_tensor() -> None:
    store = MemoryStore()
    held = {"w": torch.ones(3000), "base": torch.ones(5000), "other": torch.ones(5000)}
    made = make_checkpoint(store, 1, 1, [held], frozen=["base", "other"], chunk_bytes=4096)
    report = verify(store, made)
    assert report.is_good
    assert (report.num_files, report.num_bytes) == (4, made.data_bytes)
    name = names.frozen(1, 1, 0)
    flip(store, name, 4096 + 2 * 5000 * 4 - 1)
    (problem,) = verify(store, made).problems
    assert (problem.kind, problem.rank, problem.key) == ("corrupt", 0, "other")
    assert problem.message.startswith(f"{name} is damaged in chunk 10 ")
    store.delete(name)
    (problem,) = verify(store, made).problems
    assert (problem.kind, problem.key) == ("not-found", name)
