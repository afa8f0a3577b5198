"""Ranks find the newest save that all of them have, however late or incomplete their own saves are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.run.saves import StableStep


class World:
    """Ranks that exchange values as `Ranks.exchange_flags` does: one call late."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = [StableStep() for _ in range(num_ranks)]
        self._sent: list[tuple[int | None, int, bool]] = []

    def exchange(self) -> int | None:
        """Run one exchange, and return the step that all ranks found by it."""
        sent, self._sent = self._sent, [(rank.proposed, *rank.propose()) for rank in self.ranks]
        if not sent:
            return None
        lowest, is_lacked = min(newest for _, newest, _ in sent), any(lacks for _, _, lacks in sent)
        found = {
            rank.receive(answered, lowest, is_lacked=is_lacked)
            for rank, (answered, _, _) in zip(self.ranks, sent, strict=True)
        }
        assert len(found) == 1, "every rank finds the same step"
        return found.pop()


def test_a_step_of_all_ranks_is_found_after_four_exchanges() -> None:
    world = World(3)
    for rank in world.ranks:
        rank.add(10)
    assert [world.exchange() for _ in range(6)] == [None, None, None, 10, None, None]
    assert {rank.newest for rank in world.ranks} == {10}


def test_a_step_that_one_rank_lacks_is_never_found() -> None:
    """The lowest of the newest is 20, which the first rank failed to save; 10 was never proposed."""
    world = World(2)
    for step in (10, 30):
        world.ranks[0].add(step)
    for step in (10, 20):
        world.ranks[1].add(step)
    assert [world.exchange() for _ in range(8)] == [None] * 8
    for rank in world.ranks:
        rank.add(40)
    assert 40 in [world.exchange() for _ in range(6)]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=4), min_size=1, max_size=40)
)
def test_only_steps_of_every_rank_are_found(events: list[list[tuple[int, int]]]) -> None:
    """Ranks save the same steps in order, each in its own time, and some of them never."""
    world = World(3)
    at, has = [0, 0, 0], [set[int](), set[int](), set[int]()]
    known: list[int] = []
    for between in events:
        for rank, stride in between:
            at[rank] += stride  # the steps it strides over have failed here
            has[rank].add(at[rank])
            world.ranks[rank].add(at[rank])
        found = world.exchange()
        if found is not None:
            assert all(found in own for own in has)
            known.append(found)
    assert known == sorted(set(known))


@given(st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_the_newest_step_is_found_once_all_ranks_have_it(late: list[int]) -> None:
    world = World(3)
    for moment in range(12):
        for rank, wait in zip(world.ranks, late, strict=True):
            if moment == wait:
                rank.add(7)
        world.exchange()
    assert {rank.newest for rank in world.ranks} == {7}
