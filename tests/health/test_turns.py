"""Turns of the audit: every tensor in its turn, on all of its holders alike, within the stated cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.copies import Copies
from holdfast.checkpoint.state.capture import shared_tensors
from holdfast.checkpoint.state.sharding import Sharding, ShardLayout, held_by
from holdfast.watch.replicas.trainer import FREE_BYTES, MAX_TURNS, turns_of

DDP4 = held_by((0, 1, 2, 3))
HSDP = ShardLayout(((0, 2),), ((0, 1), (2, 3)))
PAIR = held_by((0, 1))
ALONE = held_by((0,))


def captured(tensors: dict[str, tuple[int, ShardLayout]], lowest: tuple[str, ...] = ()) -> Any:
    """A state of float32 vectors. Their memory is never touched."""
    structure = SimpleNamespace(
        shardings={
            name: Sharding((size,), ALONE if name in lowest else layout)
            for name, (size, layout) in tensors.items()
        },
        lowest={name: tensors[name][1] for name in lowest},
        owned=frozenset(tensors),
    )
    vectors = {name: torch.empty(size, device="meta") for name, (size, _) in tensors.items()}
    return SimpleNamespace(tensors=vectors, structure=structure)


def turns_on(state: Any, rank: int, *, within: int | None = None) -> Copies:
    """The turns that a rank computes for its tensors."""
    catalog: Any = SimpleNamespace(tensors=list(state.tensors))
    return turns_of(shared_tensors(state, catalog, rank), within=within)


def names(turns: Copies, attempt: int = 1) -> list[set[str]]:
    return [set(turns.names_at(save, attempt)) for save in range(max(turns.num_saves, 1))]


layouts = st.sampled_from([DDP4, HSDP, PAIR, ALONE])
states = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.tuples(st.integers(0, 50 << 20), layouts), max_size=30
)


@given(states, st.none() | st.integers(1, 70), st.integers(1, 999))
def test_every_shared_tensor_has_its_turn(
    tensors: dict[str, tuple[int, ShardLayout]], within: int | None, attempt: int
) -> None:
    turns = turns_on(captured(tensors), 0, within=within)
    shared = {name for name, (size, layout) in tensors.items() if size and len(layout.copies) > 1}
    assert set().union(*names(turns, attempt)) == shared
    assert turns.num_saves <= (MAX_TURNS if within is None else within)


@given(states, st.integers(0, 99))
def test_all_holders_find_the_same_turn(tensors: dict[str, tuple[int, ShardLayout]], save: int) -> None:
    found: dict[str, set[bool]] = {}
    for rank in range(4):
        held = {name: one for name, one in tensors.items() if rank in one[1].holders}
        due = set(turns_on(captured(held), rank).names_at(save, 3))
        for name, (size, layout) in held.items():
            if size and len(layout.copies) > 1:
                found.setdefault(name, set()).add(name in due)
    assert all(len(one) == 1 for one in found.values())


@given(st.lists(st.integers(1, 4 << 20), min_size=1, max_size=200))
def test_a_turn_has_an_eighth_of_what_a_rank_writes_or_the_free_bytes(sizes: list[int]) -> None:
    """Beyond that, at most one more tensor: none is divided."""
    turns = turns_on(captured({f"t{i}": (size, PAIR) for i, size in enumerate(sizes)}), 0)
    bound = max(FREE_BYTES, 4 * sum(sizes) / 2 / 8) + 4 * max(sizes)
    sizes_by_name = {f"t{i}": 4 * size for i, size in enumerate(sizes)}
    assert all(sum(sizes_by_name[name] for name in one) <= bound for one in names(turns))


def test_a_small_state_is_compared_at_each_save() -> None:
    assert names(turns_on(captured({"w": (10, PAIR), "b": (10, DDP4)}), 0)) == [{"w", "b"}]


def test_buffers_that_the_lowest_rank_writes_are_compared_too() -> None:
    state = captured({"buffer": (10, PAIR)}, lowest=("buffer",))
    assert [names(turns_on(state, rank)) for rank in (0, 1)] == [[{"buffer"}]] * 2


def test_pure_shards_have_no_copy() -> None:
    shards = ShardLayout(((0, 4),), ((0, 1, 2, 3),))
    assert turns_on(captured({"w": (10, shards)}), 0).num_saves == 0


def test_short_attempts_compare_different_tensors() -> None:
    turns = turns_on(captured({f"t{i}": (10, PAIR) for i in range(8)}), 0, within=8)
    seen = [next(iter(set(turns.names_at(0, attempt)))) for attempt in range(1, 9)]
    assert len(set(seen)) >= 6, "attempts that end after one save"
