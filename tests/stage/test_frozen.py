"""Frozen tensors: copied before save() returns at first, then in the background while they do not change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch

from holdfast.checkpoint.format.layout import parse_header
from holdfast.checkpoint.stage import Arena, SavePlan, Stager, stager, watch
from holdfast.checkpoint.stage.stager import Staging
from stage.training import WAIT_S, CopyGate, make_plan

SIZE = 20_000  # elements: large enough to be copied beside the training
NAMES = ("w", "plain", "base", "head")
OWNED, FROZEN = {"w"}, {"base", "head"}


@dataclass
class Saves:
    """Saves of some tensors by one stager, and which were copied before `stage` returned."""

    tensors: dict[str, torch.Tensor]
    stager: Stager = field(default_factory=Stager)
    at_once: list[set[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = self.make_plan()

    def make_plan(self) -> SavePlan:
        """An optimizer owns w; base and head are frozen; plain is neither."""
        return make_plan(self.tensors, OWNED, frozen=FROZEN)

    def stage(self, gate: CopyGate | None = None) -> tuple[Staging, dict[str, torch.Tensor]]:
        """Stage, and read back what the arena holds then; with a gate, note what came before it opened."""
        plan, arena = self.plan, Arena(1, self.plan.arena_bytes)
        for view in plan.views(arena):
            view.fill_(-1)
        staging = self.stager.stage(plan, self.tensors, arena, then=lambda _: None)
        if gate is not None:
            assert gate.reached.wait(WAIT_S)
            views = dict(zip(plan.names, plan.views(arena), strict=True))
            self.at_once.append({name for name, view in views.items() if not view.eq(-1).any()})
            gate.opened.set()
        assert staging.done.wait(WAIT_S)
        views = zip(plan.names, plan.views(arena), strict=True)
        return staging, {name: view.clone() for name, view in views}


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not record writes."""
    monkeypatch.setattr(watch, "WriteTracker", refuse)


def refuse(*_: object) -> None:
    raise OSError(38, "Function not implemented")


def make_saves(names: Iterable[str] = NAMES) -> Saves:
    return Saves({name: torch.rand(SIZE) for name in names})


@pytest.mark.parametrize("is_watched", [True, False])
def test_frozen_tensors_are_copied_in_the_background_from_the_second_save_on(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, is_watched: bool
) -> None:
    """Without a watch only they are: nothing is copied in the background at the first save."""
    expected = [{"plain", "base", "head"}, {"plain"}, {"plain"}]
    if not is_watched:
        request.getfixturevalue("unwatched")
        expected = [{"w", "plain"}] * 2
    saves = make_saves()
    if not is_watched:
        saves.stage()
    for _ in expected:
        with monkeypatch.context() as patch:
            staging, found = saves.stage(CopyGate(patch))
        assert staging.is_frozen_unchanged is not is_watched, "what is watched is not taken on trust"
        assert not staging.torn
        assert all(torch.equal(found[name], saves.tensors[name]) for name in NAMES)
    assert saves.at_once == expected


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_frozen_tensor_that_changes_during_its_copy_is_detected(
    monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    """By the kernel's record or the version counter. The next saves, not only one, copy it at once."""
    saves = make_saves()
    saves.stage()
    gate, plan = CopyGate(monkeypatch), saves.plan
    staging = saves.stager.stage(plan, saves.tensors, Arena(1, plan.arena_bytes), then=lambda _: None)
    assert gate.reached.wait(WAIT_S)
    base = saves.tensors["base"]
    (base if is_counted else base.data)[5000] = 3
    gate.opened.set()
    assert staging.done.wait(WAIT_S)
    assert staging.torn
    assert staging.changed == ("base",)
    saves.at_once.clear()
    for _ in range(8):
        gate.opened.clear()
        gate.reached.clear()
        assert not saves.stage(gate)[0].torn
    first = {"head"} if is_counted else set[str]()  # the versions of all are compared with the previous ones
    assert saves.at_once == [{"plain", "base"} | first, *[{"plain", "base"}] * 7]


@pytest.mark.usefixtures("unwatched")
def test_after_a_version_change_a_frozen_tensor_is_copied_before_save_returns() -> None:
    """One changed frozen tensor is enough; a replaced one counts too, and changes of others do not."""
    saves = make_saves()
    believed = []
    for number in range(6):
        saves.tensors["w"].add_(1)
        saves.tensors["plain"].add_(1)
        if number == 2:
            saves.tensors["head"].add_(1)
        if number == 4:
            saves.tensors["base"] = saves.tensors["base"].clone()
        staging, found = saves.stage()
        believed.append(staging.is_frozen_unchanged)
        assert all(torch.equal(found[name], saves.tensors[name]) for name in NAMES)
    assert believed == [False, True, False, True, False, True]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("event", ["failed save", "failed copy", "new plan"])
def test_after_a_failed_save_and_for_a_new_plan_they_are_copied_before_save_returns(
    monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """With other names, for example, their file has other bytes although the tensors are equal."""
    saves = make_saves()
    saves.stage()
    if event == "failed save":
        saves.stager.distrust_frozen()
    elif event == "new plan":
        saves.plan = saves.make_plan()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(stager, "_copy_in_threads", refuse)
            with pytest.raises(OSError, match="not implemented"):
                saves.stage()
        saves.stager.wait()
    assert [saves.stage()[0].is_frozen_unchanged for _ in range(2)] == [False, True]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("names", [("w", "plain"), ("base", "head")])
def test_a_state_may_have_only_frozen_tensors_or_none(names: tuple[str, ...]) -> None:
    saves = make_saves(names)
    plan = saves.plan
    if (has_frozen := "base" in names) is False:
        assert plan.frozen_file is None
        assert plan.arena_bytes == plan.num_bytes == plan.file.file_bytes
    for expected in (False, has_frozen, has_frozen):
        staging, found = saves.stage()
        assert staging.is_frozen_unchanged == expected
        assert all(torch.equal(found[name], saves.tensors[name]) for name in names)


def test_the_arena_holds_both_files_byte_for_byte() -> None:
    """The second begins on a whole page; what is between belongs to neither."""
    saves = make_saves()
    plan = saves.plan
    arena = Arena(1, plan.arena_bytes)
    staging = saves.stager.stage(plan, saves.tensors, arena, then=lambda _: None)
    assert staging.done.wait(WAIT_S)
    assert plan.frozen_file is not None
    assert plan.frozen_at % 4096 == 0
    assert plan.frozen_at >= plan.file.file_bytes
    assert plan.num_bytes == plan.file.file_bytes + plan.frozen_file.file_bytes
    data = arena.bytes.numpy().tobytes()
    images = {
        ("w", "plain"): data[: plan.file.file_bytes],
        ("base", "head"): data[plan.frozen_at : plan.frozen_at + plan.frozen_file.file_bytes],
    }
    for names, image in images.items():
        entries, start = parse_header(image, "image")
        assert set(entries) == {"__metadata__", *names}
        for name in names:
            low, high = entries[name]["data_offsets"]
            assert image[start + low : start + high] == saves.tensors[name].numpy().tobytes()
    starts = plan.shared_starts
    assert plan.own == ()
    assert len(starts) == 4
    assert starts[plan.names.index("w")] == starts[plan.names.index("base")] == 4096
