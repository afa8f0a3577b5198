"""Choice of the saves that peers copy: equal on all ranks, and never without copies of one that all have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.run.mirroring import Mirroring
from holdfast.checkpoint.run.options import Peers


class World:
    """Ranks that save the same steps, and exchange values as `Ranks.exchange_flags` does: one call late."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = [Mirroring(Peers()) for _ in range(num_ranks)]
        self.copies: list[set[int]] = [set() for _ in self.ranks]  # whole ones that each rank's peers hold
        self._sent: list[tuple[int | None, int]] = []

    def save(self, step: int) -> bool:
        """Begin a save on all ranks; return True if it is copied."""
        chosen = {rank.begin(step) for rank in self.ranks}
        assert len(chosen) == 1, "every rank chooses the same saves"
        return chosen.pop()

    def end(self, number: int, *, is_held: bool) -> None:
        """Let the copy of the current save end on one rank."""
        rank = self.ranks[number]
        step, _ = rank.propose()
        if step is not None:
            if is_held:
                self.copies[number].add(step)
            rank.end(step, is_held=is_held)

    def exchange(self) -> None:
        """Run one exchange; the copies that are not needed any more are dropped."""
        sent, self._sent = self._sent, [rank.propose() for rank in self.ranks]
        if not sent:
            return
        lowest = min(state for _, state in sent)
        for rank, copies, (step, _) in zip(self.ranks, self.copies, sent, strict=True):
            if rank.receive(step, lowest):
                copies &= set(rank.kept)

    @property
    def held(self) -> int | None:
        """The step whose copies all ranks consider whole."""
        found = {rank.held for rank in self.ranks}
        assert len(found) == 1, "every rank finds the same step"
        return found.pop()


def test_a_save_is_copied_and_then_the_next_one() -> None:
    world = World(3)
    assert world.save(10)
    assert not world.save(20), "one at a time"
    for number in range(3):
        world.end(number, is_held=True)
    world.exchange()
    assert world.held is None, "an exchange is known one call later"
    world.exchange()
    assert world.held == 10
    assert world.save(30)
    assert world.ranks[0].kept == [10, 30]


def test_a_save_that_one_rank_cannot_copy_is_given_up_by_all() -> None:
    world = World(2)
    world.save(10)
    world.end(0, is_held=True)
    world.end(1, is_held=False)
    world.exchange()
    world.exchange()
    assert world.held is None
    assert world.save(20)


def test_without_exchanges_each_rank_goes_by_its_own_copies() -> None:
    rank = Mirroring(Peers())
    assert rank.begin(1)
    assert not rank.begin(2), "it is being copied"
    rank.end(1, is_held=True)
    assert rank.begin(3)
    assert rank.held == 1


@given(
    st.integers(1, 3),
    st.lists(
        st.one_of(
            st.just("save"),
            st.just("exchange"),
            st.tuples(st.integers(0, 2), st.sampled_from([True, True, False])),
        ),
        max_size=60,
    ),
)
def test_copies_of_the_held_step_are_whole_on_all_ranks_at_any_time(
    num_ranks: int, events: list[str | tuple[int, bool]]
) -> None:
    world, step = World(num_ranks), 0
    world.exchange()  # so that no rank goes by its own outcomes
    for event in events:
        if event == "save":
            step += 1
            world.save(step)
            world.exchange()
        elif event == "exchange":
            world.exchange()
        else:
            number, is_held = event
            world.end(int(number) % num_ranks, is_held=bool(is_held))
        if world.held is not None:
            assert all(world.held in copies for copies in world.copies)
        assert all(len(rank.kept) <= 2 for rank in world.ranks), "two generations at most"
