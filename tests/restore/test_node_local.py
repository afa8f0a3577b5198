"""Checkpoints in folders of several hosts: what is complete together; ranks pass on what others lack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.restore.candidates import Holding, Request, Selection, find_holdings, put_together
from holdfast.checkpoint.restore.resume import restore_newest
from holdfast.checkpoint.restore.share import OTHER_RANKS, assign_blocks
from holdfast.checkpoint.restore.stages import Restored
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.store.tiered import TieredStore
from holdfast.errors import Corrupt, NotFound
from making import RUN_ID, flip, make_checkpoint, make_home
from restore.test_resume import Live
from restore.thread_ranks import ThreadRank, on_threads

NUMBERS = torch.arange(40_000, dtype=torch.float32)
HALF = len(NUMBERS) // 2


@dataclass
class Hosts:
    """A home and a local folder for each of two ranks."""

    home: MemoryStore = field(default_factory=lambda: MemoryStore("home"))
    local: list[MemoryStore] = field(default_factory=lambda: [MemoryStore("a"), MemoryStore("b")])
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        make_home(self.home)

    def save(self, step: int, *, to_home: tuple[int, ...] = (), kept: tuple[int, ...] = (0, 1)) -> None:
        """Two ranks save halves of a tensor; whose files come home, and whose stay in their folders."""
        whole = MemoryStore()
        halves = [
            {"w": (NUMBERS[rank * HALF : (rank + 1) * HALF] + step, (rank * HALF,), (len(NUMBERS),))}
            for rank in (0, 1)
        ]
        make_checkpoint(whole, step, 1, halves, values=[{"n": step}] * 2, commit=False, chunk_bytes=4096)
        for rank in (0, 1):
            for name in (names.data(step, 1, rank), names.part(step, 1, rank)):
                if rank in to_home:
                    self.home.put(name, whole.get(name))
                if rank in kept:
                    self.local[rank].put(name, whole.get(name))

    def restore(self, step: int | None = None) -> tuple[list[Live], list[Any]]:
        """What both ranks have afterwards, and what their restores return or raise."""
        lives = [Live({"w": torch.zeros(len(NUMBERS))}) for _ in (0, 1)]

        def work(rank: ThreadRank) -> Restored | None:
            request = Request(
                TieredStore([self.local[rank.rank], self.home]),
                lives[rank.rank].load,
                rank,
                Selection(step),
                num_threads=2,
                own_local=self.local[rank.rank],
                show=self.said.append,
            )
            return restore_newest(request)

        return lives, on_threads(work, 2)

    def check_restores(self, step: int) -> list[Restored]:
        lives, found = self.restore()
        for live, one in zip(lives, found, strict=True):
            assert isinstance(one, Restored), one
            assert (one.step, one.attempt) == (step, 1)
            assert torch.equal(live.tensors["w"], NUMBERS + step)
        return found


def test_two_halves_on_two_disks_are_a_checkpoint() -> None:
    """Each rank loads the whole tensor, and receives the missing half from the other."""
    hosts = Hosts()
    hosts.save(10)
    for one in hosts.check_restores(10):
        assert one.sources.keys() == {OTHER_RANKS, f"memory://{'ab'[found_rank(one)]}"}
    assert hosts.said == []
    assert not list(hosts.home.list("step-")), "home is left to the drains"


def found_rank(one: Restored) -> int:
    return 0 if "memory://a" in one.sources else 1


def test_files_that_one_disk_lacks_are_read_from_home() -> None:
    """The union counts: one rank's files in home only, the other's on its disk only."""
    hosts = Hosts()
    hosts.save(10, to_home=(0,), kept=(1,))
    first, second = hosts.check_restores(10)
    assert first.sources.keys() == {"memory://home", OTHER_RANKS}
    assert second.sources.keys() == {"memory://home", "memory://b"}


def test_the_newest_complete_checkpoint_is_restored_and_newer_ones_are_named() -> None:
    hosts = Hosts()
    hosts.save(10)
    hosts.save(20)
    hosts.save(30, kept=(0,))
    hosts.check_restores(20)
    assert hosts.said == ["step 30 of attempt 1 is incomplete: the files of ranks 1 are missing"] * 2


def test_a_save_that_is_all_in_home_but_for_its_manifest_is_committed_there() -> None:
    hosts = Hosts()
    hosts.save(10, to_home=(0, 1))
    found = hosts.check_restores(10)
    assert [one.finished for one in found] == [(((1, 10), "memory://home"),)] * 2
    assert hosts.home.size(names.manifest(10, 1)) is not None


def test_without_a_complete_checkpoint_training_starts_afresh_with_a_line() -> None:
    hosts = Hosts()
    hosts.save(10, kept=(1,))
    assert hosts.restore()[1] == [None, None]
    assert hosts.said == ["step 10 of attempt 1 is incomplete: the files of ranks 0 are missing"] * 2


def test_damage_on_the_only_copy_falls_back_on_both_ranks() -> None:
    """The rank that reads it for the other sends the error; both restore the step before."""
    hosts = Hosts()
    hosts.save(10)
    hosts.save(20)
    flip(hosts.local[0], names.data(20, 1, 0))
    for one in hosts.check_restores(10):
        assert len(one.skipped) == 1
        assert "damaged in chunk" in one.skipped[0].reason


def test_a_damaged_part_does_not_count() -> None:
    hosts = Hosts()
    hosts.save(10)
    flip(hosts.local[1], names.part(10, 1, 1))
    assert hosts.restore()[1] == [None, None]


def test_a_local_copy_that_is_damaged_is_mended_from_home() -> None:
    hosts = Hosts()
    hosts.save(10, to_home=(0, 1))
    flip(hosts.local[1], names.data(10, 1, 1))
    assert any("damaged in chunk" in line for one in hosts.check_restores(10) for line in one.recovered_from)


@pytest.mark.parametrize(("step", "kind"), [(10, None), (20, NotFound)])
def test_a_step_can_be_chosen(step: int, kind: type[Exception] | None) -> None:
    hosts = Hosts()
    hosts.save(10)
    hosts.save(20, kept=(0,))
    found = hosts.restore(step)[1]
    for one in found:
        assert one.step == step if kind is None else isinstance(one, kind)


def test_parts_that_do_not_belong_together_are_not_a_checkpoint() -> None:
    """Of two runs of the same name and numbers, say, of which each host has one."""
    hosts = Hosts()
    hosts.save(10)
    other = MemoryStore()
    make_checkpoint(other, 10, 1, [{"x": torch.ones(3)}, {"y": torch.ones(3)}], commit=False, run_id=RUN_ID)
    for name in (names.data(10, 1, 1), names.part(10, 1, 1)):
        hosts.local[1].put(name, other.get(name))
    found = hosts.restore()[1]
    assert all(isinstance(one, Corrupt) and "was not committed" in str(one) for one in found), found


def test_a_folder_holds_the_files_that_its_parts_describe() -> None:
    hosts = Hosts()
    hosts.save(10)
    hosts.save(20)
    hosts.local[0].put(names.data(20, 1, 0), b"cut short")
    (found,) = find_holdings(hosts.local[0], RUN_ID)
    assert (found.step, found.rank, found.world_size) == (10, 0, 2)
    assert find_holdings(hosts.local[0], "another run") == []
    assert find_holdings(hosts.local[0], None, besides={CheckpointId(1, 10)}) == []


def holding(step: int, rank: int, *, seal: str = "same") -> Holding:
    return Holding(1, step, rank, 2, 10, seal, 100, None)


def test_every_rank_can_read_what_home_has() -> None:
    complete, lacking = put_together([[holding(5, 0)], [holding(7, 1)]], [holding(5, 1)])
    assert [(one.checkpoint, one.holders) for one in complete] == [((1, 5), {0: (0,), 1: (0, 1)})]
    assert lacking == {(1, 7): [0]}
    assert [file.rank for file in complete[0].sent_by(0)] == [0, 1]
    assert complete[0].sent_by(1) == []


def test_of_two_different_copies_the_one_that_more_can_read_is_taken() -> None:
    mine, theirs = holding(5, 0, seal="mine"), holding(5, 0, seal="theirs")
    ((one,), _) = put_together([[mine, holding(5, 1)], [theirs], [theirs]], [])
    assert one.files[0] is theirs
    assert one.holders[0] == (1, 2)


def test_blocks_are_read_by_ranks_that_have_the_files() -> None:
    """Rank 2 needs two files and has none; the lenders of each share the work."""
    needs = [[], [], [(0, 0, 0, 8, 8 << 20), (1, 0, 0, 1, 8 << 20)]]
    blocks = assign_blocks(needs, {0: (0, 1), 1: (1,)})
    assert {block.ranks for block in blocks} == {(2,)}
    assert {block.reader for block in blocks if block.key == (1, False)} == {1}
    assert {block.reader for block in blocks if block.key == (0, False)} == {0, 1}
