"""Witnesses: tensors that other ranks write, copied beside the save, and left out if they are torn."""

from __future__ import annotations

import pytest
import torch

from holdfast.checkpoint.stage import Arena, SavePlan, Stager
from holdfast.checkpoint.stage.stager import Staging
from stage.training import WAIT_S, CopyGate, make_plan

SIZE = 20_000  # elements: large enough to be copied beside the training


def make() -> tuple[dict[str, torch.Tensor], SavePlan]:
    """Rank 0 writes w. Rank 1 writes the others: the optimizer owns other, nothing owns buffer."""
    tensors = {name: torch.arange(SIZE) + 0.5 for name in ("w", "other", "buffer")}
    return tensors, make_plan(tensors, {"w", "other"}, witnesses=("other", "buffer"))


def at(plan: SavePlan, *indices: int) -> dict[int, int]:
    return {index: plan.witness_at + 4 * SIZE * i for i, index in enumerate(indices)}


def copy_in(arena: Arena, offset: int) -> torch.Tensor:
    return arena.bytes[offset : offset + 4 * SIZE].view(torch.float32)


def begin(stager: Stager, plan: SavePlan, tensors: dict[str, torch.Tensor], *indices: int) -> Staging:
    arena = Arena(1, plan.arena_bytes)
    return stager.stage(plan, tensors, arena, then=lambda _: None, witnesses=at(plan, *indices))


def staged(stager: Stager, plan: SavePlan, tensors: dict[str, torch.Tensor], *indices: int) -> Staging:
    staging = begin(stager, plan, tensors, *indices)
    assert staging.done.wait(WAIT_S)
    return staging


@pytest.mark.parametrize("indices", [(), (1,), (2,), (1, 2)])
def test_the_witnesses_of_a_save_are_copied(indices: tuple[int, ...]) -> None:
    tensors, plan = make()
    staging = staged(Stager(), plan, tensors, *indices)
    assert not staging.torn
    for index, offset in at(plan, *indices).items():
        assert torch.equal(copy_in(staging.arena, offset), tensors[plan.live_names[index]])


def test_a_torn_witness_is_left_out_and_the_save_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write without a version counter, while the copy runs. The next copy is made at once."""
    tensors, plan = make()
    stager = Stager()
    gate = CopyGate(monkeypatch)
    staging = begin(stager, plan, tensors, 1)
    assert gate.reached.wait(WAIT_S)
    tensors["other"].data[SIZE // 2] = -1.0
    gate.opened.set()
    assert staging.done.wait(WAIT_S)
    assert not staging.torn
    assert staging.torn_witnesses == {1}
    again = staged(stager, plan, tensors, 1)
    assert not again.torn_witnesses
    assert copy_in(again.arena, plan.witness_at)[SIZE // 2] == -1.0


def test_a_tensor_that_nothing_owns_is_copied_before_stage_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, plan = make()
    gate = CopyGate(monkeypatch)
    staging = begin(Stager(), plan, tensors, 2)
    assert gate.reached.wait(WAIT_S)
    tensors["buffer"].zero_()
    gate.opened.set()
    assert staging.done.wait(WAIT_S)
    assert not staging.torn_witnesses
    assert copy_in(staging.arena, plan.witness_at)[1] == 1.5
