"""Restoring the newest good checkpoint: fallback with reasons, agreement of ranks, refusals."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from faulty_store import FaultyStore
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.layout import FillTarget, whole
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.commit import recover_commit
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.restore.candidates import Mark, Request, Selection
from holdfast.checkpoint.restore.resume import restore_newest
from holdfast.checkpoint.restore.stages import Restored
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.store.tiered import TieredStore
from holdfast.errors import Corrupt, Denied, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported
from making import flip, make_checkpoint, make_home, reseal
from restore.thread_ranks import ThreadRank, alone, on_threads

IGNORE: Mark = lambda skipped, restored: None  # noqa: E731 - a default


@dataclass
class Live:
    """Live objects of a rank: tensors that `load` fills by name."""

    tensors: dict[str, torch.Tensor]
    strict: bool = True
    finished: list[int] = field(default_factory=list)
    values: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)

    def load(self, manifest: Manifest, values: Sequence[Mapping[str, Any]]) -> Plan:
        saved = set(manifest.tensors)
        if self.strict and saved != self.tensors.keys():
            raise InvalidInput(f"the model has {sorted(self.tensors)}, the checkpoint {sorted(saved)}")
        self.values.append(values)
        wanted = sorted(saved & self.tensors.keys())
        return Plan(self, manifest.step, {name: [FillTarget(self.tensors[name])] for name in wanted})


@dataclass
class Plan:
    """Plan that `Live.load` returns."""

    live: Live
    step: int
    targets: Mapping[str, Sequence[FillTarget]]

    def finish(self) -> None:
        self.live.finished.append(self.step)


def restore(
    store: Store, live: Live, step: int | None = None, *, patience_s: float = 60.0, mark: Mark = IGNORE
) -> Restored:
    restored = restore_newest(
        Request(store, live.load, alone(), Selection(step), num_threads=2, patience_s=patience_s, mark=mark)
    )
    assert restored is not None
    return restored


def on_ranks(store: Store, lives: list[Live], *, patience_s: float = 60.0) -> list[Any]:
    """Return the result or the error of each rank's restore."""

    def work(rank: ThreadRank) -> Restored | None:
        request = Request(store, lives[rank.rank].load, rank, num_threads=2, patience_s=patience_s)
        return restore_newest(request)

    return on_threads(work, len(lives))


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000,), float(step)), "n": torch.tensor(step)}


def empty_live() -> Live:
    return Live({"w": torch.zeros(3000), "n": torch.tensor(0)})


def make_store(steps: tuple[int, ...] = (100, 200, 300)) -> MemoryStore:
    store = MemoryStore()
    make_home(store)
    for step in steps:
        make_checkpoint(store, step, 1, [state_of(step)], chunk_bytes=4096)
    return store


def zero(store: Store, name: str, start: int, num_bytes: int) -> None:
    data = bytearray(store.get(name))
    assert any(data[start : start + num_bytes])
    data[start : start + num_bytes] = bytes(num_bytes)
    store.put(name, data)


def test_the_newest_is_restored() -> None:
    live = empty_live()
    restored = restore(make_store(), live)
    assert (restored.step, restored.attempt, restored.world_size, restored.skipped) == (300, 1, 1, ())
    assert restored.num_bytes >= 12_000
    assert restored.seconds > 0
    assert live.tensors["w"].eq(300).all()
    assert live.tensors["n"].item() == 300
    assert live.finished == [300]


def test_an_empty_home_is_a_fresh_start() -> None:
    store = MemoryStore()
    request = Request(store, empty_live().load, alone())
    assert restore_newest(request) is None
    make_home(store)
    make_checkpoint(store, 5, 1, [{"w": torch.zeros(1)}, {}], commit=False)
    store.delete(names.part(5, 1, 1))
    assert restore_newest(request) is None


DATA, PART, MANIFEST = names.data(300, 1, 0), names.part(300, 1, 0), names.manifest(300, 1)
HARM: dict[str, tuple[Callable[[MemoryStore], None], str]] = {
    "flipped bit in data": (lambda store: flip(store, DATA), "damaged in chunk"),
    "flipped bit in header": (lambda store: flip(store, DATA, 4100), "damaged in chunk"),
    "flipped bit in part": (lambda store: flip(store, PART), "its catalog does not match its digest"),
    "flipped bit in manifest": (lambda store: flip(store, MANIFEST), "seal"),
    "zeroed hole": (lambda store: zero(store, DATA, 8192, 4096), "damaged in chunk 2 "),
    "truncated data": (lambda store: store.put(DATA, store.get(DATA)[:-1]), "truncated"),
    "truncated manifest": (lambda store: store.put(MANIFEST, store.get(MANIFEST)[:50]), "seal"),
    "missing data": (lambda store: store.delete(DATA), "missing"),
    "missing part": (lambda store: store.delete(PART), "missing"),
    "manifest of another run": (lambda store: reseal(store, MANIFEST, run="run-2"), "belongs to another run"),
    "manifest of the future": (lambda store: reseal(store, MANIFEST, version=3), "Upgrade"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_checkpoint_is_skipped_for_an_older_one(harm: str) -> None:
    store, live = make_store(), empty_live()
    do, reason = HARM[harm]
    do(store)
    restored = restore(store, live)
    assert restored.step == 200
    (skipped,) = restored.skipped
    assert (skipped.step, skipped.attempt) == (300, 1)
    assert skipped.reason.startswith("rank 0: ")
    assert re.search(reason, skipped.reason)
    assert live.tensors["w"].eq(200).all()
    assert live.finished == [200]


def test_extra_files_and_a_missing_run_document_are_harmless() -> None:
    store = make_store()
    store.put("step-00000300/notes.txt", b"mine")
    store.put(names.data(300, 1, 9), b"?")
    for _ in range(2):
        restored = restore(store, empty_live())
        assert (restored.step, restored.skipped) == (300, ())
        store.delete(names.RUN)


def test_none_good_raises_with_all_reasons_and_never_starts_from_zero() -> None:
    store, live = make_store(), empty_live()
    for step in (100, 200):
        flip(store, names.data(step, 1, 0))
    store.delete(names.data(300, 1, 0))
    with pytest.raises(Corrupt, match="must not start from zero") as caught:
        restore(store, live)
    for step in (100, 200, 300):
        assert f"step {step}, attempt 1: rank 0: " in str(caught.value)
    assert "do not train with them" in str(caught.value)
    assert live.finished == []


def test_checkpoints_of_a_newer_format_alone_raise_unsupported() -> None:
    store = make_store((100,))
    reseal(store, names.manifest(100, 1), version=3)
    with pytest.raises(Unsupported, match="Upgrade"):
        restore(store, empty_live())


def test_a_requested_step_is_restored_or_raised() -> None:
    store, live = make_store(), empty_live()
    assert restore(store, live, step=200).step == 200
    flip(store, names.data(200, 1, 0))
    with pytest.raises(Corrupt, match="step 200"):
        restore(store, live, step=200)
    with pytest.raises(NotFound, match="Complete steps, newest first: 300"):
        restore(store, live, step=250)


def uncommitted_400() -> FaultyStore:
    store = FaultyStore(MemoryStore())
    make_checkpoint(store, 300, 1, [state_of(300)])
    make_checkpoint(store, 400, 1, [state_of(400)], commit=False)
    return store


@pytest.mark.parametrize("num_failures", [0, 2])
def test_a_commit_is_finished_before_the_newest_is_chosen_once_the_store_takes_it(num_failures: int) -> None:
    store = uncommitted_400()
    store.fail("put", RetryLater("disk full"), times=num_failures)
    assert restore(store, empty_live()).step == 400
    assert store.size(names.manifest(400, 1)) is not None


def test_a_commit_that_the_store_never_takes_stops_the_restore() -> None:
    store = uncommitted_400()
    store.fail("put", RetryLater("disk full"), times=None)
    with pytest.raises(RetryLater, match="Step 400 lacks only its manifest") as caught:
        restore(store, empty_live(), patience_s=0)
    assert caught.value.step == 400
    # Another step needs no manifest of 400.
    assert restore(store, empty_live(), step=300, patience_s=0).step == 300


def test_a_save_without_manifest_in_a_read_only_home_is_skipped() -> None:
    store = uncommitted_400()
    store.fail("put", Denied("read-only"), times=None)
    restored = restore(store, empty_live())
    assert restored.step == 300
    assert [(one.step, "read-only" in one.reason) for one in restored.skipped] == [(400, True)]


FAILING = {
    "manifest": ("get", MANIFEST),
    "part": ("get", PART),
    "data": ("read_into", DATA),
    "listing of the home": ("list", ""),
    "listing of the step": ("list", names.step_dir(300)),
    "run": ("get", names.RUN),
}


@pytest.mark.parametrize("what", FAILING)
def test_a_passing_error_does_not_make_an_older_checkpoint_the_newest(what: str) -> None:
    store = FaultyStore(make_store())
    method, name = FAILING[what]
    store.fail(method, RetryLater("stale file handle"), times=2, matching=name)
    noted: list[Any] = []
    restored = restore(store, live := empty_live(), mark=lambda *said: noted.append(said))
    assert restored.step == 300
    assert not restored.skipped
    assert not noted
    assert torch.equal(live.tensors["w"], state_of(300)["w"])


@pytest.mark.parametrize("what", FAILING)
def test_a_lasting_error_stops_the_restore_and_names_the_older_step(what: str) -> None:
    store = FaultyStore(make_store())
    method, name = FAILING[what]
    store.fail(method, RetryLater("stale file handle"), times=None, matching=name)
    noted: list[Any] = []
    with pytest.raises(RetryLater, match="stale file handle") as caught:
        restore(store, empty_live(), patience_s=0, mark=lambda *said: noted.append(said))
    if what in ("manifest", "part", "data", "listing of the step"):
        assert caught.value.step == 300
        assert "restore(step=200)" in str(caught.value)
        ((skipped, restored),) = noted
        assert [(one.step, one.attempt) for one in skipped] == [(300, 1)]
        assert restored is None
        assert restore(store, empty_live(), step=200).step == 200


def test_damage_that_is_certain_counts_although_another_rank_could_not_read() -> None:
    store = FaultyStore(two_rank_store())
    flip(store, names.part(200, 1, 0))
    store.fail("get", RetryLater("no answer"), matching=names.part(200, 1, 1), times=None)
    lives = [rank_live(), rank_live()]
    assert [one.step for one in on_ranks(store, lives)] == [100, 100]


def test_a_damaged_near_copy_is_not_damage_while_the_far_one_is_unreadable() -> None:
    near, far = FaultyStore(make_store()), FaultyStore(make_store())
    flip(near, names.data(300, 1, 0))
    far.fail("read_into", RetryLater("no answer"), matching=names.data(300, 1, 0), times=2)
    assert restore(TieredStore([near, far]), empty_live()).step == 300


def test_an_unreadable_near_tier_does_no_harm_if_the_far_one_is_intact() -> None:
    near, far = FaultyStore(make_store()), make_store()
    for method in ("get", "read_into", "size"):
        near.fail(method, RetryLater("input/output error"), times=None)
    near.fail("list", RetryLater("input/output error"), times=None, matching="step-")
    assert restore(TieredStore([near, far]), empty_live(), patience_s=0).step == 300


def test_a_store_that_refuses_access_raises_at_once() -> None:
    store = FaultyStore(make_store())
    store.fail("get", Denied("no permission"), matching=names.manifest(300, 1), times=None)
    with pytest.raises(Denied, match="no permission"):
        restore(store, empty_live())


def test_fallback_skips_a_superseded_branch_and_notes_what_does_not_verify() -> None:
    """Attempt 2 went back from 300 to 100; when its 200 is damaged, 100 is the newest of its line."""
    store, live, noted = make_store(), empty_live(), []
    make_checkpoint(store, 200, 2, [state_of(222)], base=(1, 100), chunk_bytes=4096)
    flip(store, names.data(200, 2, 0))
    restored = restore(store, live, mark=lambda *said: noted.append(said))
    assert (restored.step, restored.attempt) == (100, 1)
    ((skipped, good),) = noted
    assert [(one.attempt, one.step) for one in skipped] == [(2, 200)]
    assert good == (1, 100)
    reasons = {(one.step, one.attempt): one.reason for one in restored.skipped}
    assert set(reasons) == {(200, 2), (300, 1), (200, 1)}
    assert reasons[300, 1] == "superseded: attempt 2 continued from step 100"
    assert restore(store, live, step=300).attempt == 1
    # A requested step falls back to the same step of an older attempt.
    assert restore(store, live, step=200).attempt == 1
    assert live.tensors["n"].item() == 200


def test_fallback_follows_the_line_of_a_superseded_checkpoint_chosen_by_hand() -> None:
    """Attempt 2 left 300 behind; attempt 3 took it by hand. If 3's is damaged, 300 is the next, not 2's."""
    store, live = make_store(), empty_live()
    make_checkpoint(store, 250, 2, [state_of(252)], base=(1, 200), chunk_bytes=4096)
    by_hand = restore(store, live, step=300)
    ancestors = (*by_hand.ancestors, (by_hand.attempt, by_hand.step))
    assert ancestors == ((1, 300),)
    make_checkpoint(store, 350, 3, [state_of(353)], ancestors=ancestors, chunk_bytes=4096)
    restored = restore(store, live)
    assert (restored.step, restored.attempt, restored.ancestors) == (350, 3, ((1, 300),))
    flip(store, names.data(350, 3, 0))
    restored = restore(store, live)
    assert (restored.step, restored.attempt) == (300, 1)
    reasons = {(one.step, one.attempt): one.reason for one in restored.skipped}
    assert set(reasons) == {(350, 3), (250, 2)}
    assert reasons[250, 2] == "superseded: attempt 3 continued from step 300"


def test_fallback_follows_the_line_across_several_restarts() -> None:
    """Attempt 2 from 200 of attempt 1, attempt 3 from 250 of attempt 2, with dead ends beside each."""
    store, live = make_store(), empty_live()
    for step in (250, 260):
        make_checkpoint(store, step, 2, [state_of(step)], base=(1, 200), chunk_bytes=4096)
    make_checkpoint(store, 255, 3, [state_of(255)], ancestors=((1, 200), (2, 250)), chunk_bytes=4096)
    order = [(255, 3), (250, 2), (200, 1), (100, 1)]
    restored = restore(store, live)
    for damaged, found in itertools.pairwise(order):
        flip(store, names.data(*damaged, 0))
        restored = restore(store, live)
        assert (restored.step, restored.attempt) == found
    assert {(one.step, one.attempt) for one in restored.skipped} == {*order[:-1], (260, 2), (300, 1)}


def test_a_model_that_does_not_fit_is_raised_and_no_older_one_is_tried() -> None:
    store = make_store()
    live = Live({"other": torch.zeros(1)})
    with pytest.raises(InvalidInput, match="the model has"):
        restore(store, live)
    assert live.values == []


def test_a_foreign_error_of_the_live_objects_is_raised_as_it_is() -> None:
    def broken(manifest: Manifest, values: object) -> Plan:
        raise ZeroDivisionError("in the user's code")

    with pytest.raises(ZeroDivisionError):
        restore_newest(Request(make_store(), broken, alone()))


@pytest.mark.parametrize("shows", ["without reading", "while reading"])
def test_tensors_left_over_from_a_damaged_checkpoint_are_not_hidden(shows: str) -> None:
    """Damage that shows without reading data touches nothing live."""
    store = make_store((100,))
    make_checkpoint(store, 200, 1, [{**state_of(200), "extra": torch.ones(9)}], chunk_bytes=4096)
    live = Live({**empty_live().tensors, "extra": torch.zeros(9)}, strict=False)
    if shows == "without reading":
        store.delete(names.data(200, 1, 0))
        assert restore(store, live).step == 100
        assert not live.tensors["extra"].any()
        return
    flip(store, names.data(200, 1, 0))
    with pytest.raises(Corrupt, match="mixes steps") as caught:
        restore(store, live)
    assert "extra" in str(caught.value)
    assert live.finished == []


def two_ranks(step: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"a": torch.full((3000,), float(step)), "own": torch.tensor([step, 0])},
        {"b": torch.full((3000,), float(-step)), "own": torch.tensor([step, 1])},
    ]


def two_rank_store() -> MemoryStore:
    store = MemoryStore()
    make_home(store)
    for step in (100, 200):
        values = [{"rank": rank} for rank in range(2)]
        make_checkpoint(store, step, 1, two_ranks(step), per_rank=["own"], values=values, chunk_bytes=4096)
    return store


def rank_live(num_items: int = 3000) -> Live:
    own = torch.zeros(2, dtype=torch.int64)
    return Live({"a": torch.zeros(num_items), "b": torch.zeros(num_items), "own": own})


def test_two_ranks_restore_together_each_its_own() -> None:
    lives = [rank_live(), rank_live()]
    results = on_ranks(two_rank_store(), lives)
    assert [(one.step, one.world_size) for one in results] == [(200, 2), (200, 2)]
    assert [live.tensors["own"].tolist() for live in lives] == [[200, 0], [200, 1]]
    assert all(live.tensors["b"].eq(-200).all() for live in lives)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_another_number_of_ranks_takes_parts_modulo_the_saved_one(world_size: int) -> None:
    lives = [rank_live() for _ in range(world_size)]
    results = on_ranks(two_rank_store(), lives)
    assert [one.step for one in results] == [200] * world_size
    assert [live.values for live in lives] == [[[{"rank": rank % 2}]] for rank in range(world_size)]
    assert [live.tensors["own"][1].item() for live in lives] == [rank % 2 for rank in range(world_size)]


def test_ancestors_are_the_same_on_every_rank() -> None:
    store = two_rank_store()
    line = ((1, 100), (2, 150))
    make_checkpoint(store, 160, 3, two_ranks(160), per_rank=["own"], ancestors=line)
    results = on_ranks(store, [rank_live(), rank_live()])
    assert [one.ancestors for one in results] == [line, line]


def test_a_rank_gets_its_own_values_first_and_those_of_each_other_structure() -> None:
    """Stages of a pipeline: ranks 0 and 1 hold one structure, ranks 2 and 3 another."""
    store = MemoryStore()
    make_home(store)
    stages = [Catalog({f"w{i}": Tensor("F32", (4,), whole(2 * i), (2 * i, 2 * i + 1))}, {}) for i in (0, 1)]
    make_checkpoint(
        store, 100, 1, [{"w0": torch.ones(4)}, {}, {"w1": torch.ones(4)}, {}],
        values=[{"rank": r} for r in range(4)], commit=False,
    )  # fmt: skip
    for r in range(4):
        starts = [] if r % 2 else [4096]
        reseal(store, names.part(100, 1, r), catalog=catalog_text(stages[r // 2]), starts=starts)
    assert recover_commit(store, list_home(store).saved[CheckpointId(attempt=1, step=100)], None)
    lives = [Live({"w0": torch.zeros(4), "w1": torch.zeros(4)}) for _ in range(6)]
    assert [one.step for one in on_ranks(store, lives)] == [100] * 6
    for rank, live in enumerate(lives):
        own = rank % 4
        assert live.values == [[{"rank": own}, {"rank": 0 if own > 1 else 2}]]
        assert live.tensors["w1"].all()


def test_damage_found_by_one_rank_makes_both_fall_back() -> None:
    """Rank 1 alone reads its own copy, and that chunk is damaged."""
    store = two_rank_store()
    part_at = store.get(names.data(200, 1, 1)).rfind(torch.tensor([200, 1]).numpy().tobytes())
    assert part_at > 0
    lives = [rank_live(), rank_live()]
    for live in lives:
        live.strict = False
        del live.tensors["b"]
    flip(store, names.data(200, 1, 1), part_at)
    results = on_ranks(store, lives)
    assert [one.step for one in results] == [100, 100]
    assert [len(one.skipped) for one in results] == [1, 1]
    assert results[0].skipped == results[1].skipped
    assert results[0].skipped[0].reason.startswith("rank 1: ")
    assert [live.tensors["own"].tolist() for live in lives] == [[100, 0], [100, 1]]
    assert [live.finished for live in lives] == [[100], [100]]


class Flaky(MemoryStore):
    """A store that rank 1 alone cannot reach, for some calls."""

    num_left = 0

    def get(self, name: str) -> bytes:
        is_rank_1 = threading.current_thread().name.endswith("_1")
        if name == names.part(200, 1, 1) and is_rank_1 and self.num_left:
            self.num_left -= 1
            raise RetryLater("unreachable")
        return super().get(name)


def flaky_store(num_failures: int) -> Flaky:
    base, store = two_rank_store(), Flaky()
    for entry in base.list():
        store.put(entry.name, base.get(entry.name))
    store.num_left = num_failures
    return store


def test_both_ranks_retry_and_then_stop_if_one_cannot_read() -> None:
    results = on_ranks(flaky_store(3), [rank_live(), rank_live()])
    assert [(one.step, one.skipped) for one in results] == [(200, ()), (200, ())]
    results = on_ranks(flaky_store(10**9), [rank_live(), rank_live()], patience_s=0.3)
    assert all(isinstance(one, RetryLater) and one.step == 200 for one in results)
    assert all("rank 1: unreachable" in str(one) for one in results)


def test_none_good_raises_on_every_rank() -> None:
    store = two_rank_store()
    for step in (100, 200):
        flip(store, names.data(step, 1, 1))
    results = on_ranks(store, [rank_live(), rank_live()])
    assert all(isinstance(one, Corrupt) for one in results)
    assert "ranks 0, 1: " in str(results[0])


def test_a_misfit_on_one_rank_is_raised_on_every_rank() -> None:
    lives = [rank_live(), rank_live(7)]
    results = on_ranks(two_rank_store(), lives)
    assert all(isinstance(one, InvalidInput) for one in results)
    assert str(results[0]).startswith("Rank 1 failed to restore the state: ")
    assert [live.finished for live in lives] == [[], []]


def test_a_foreign_error_while_finishing_is_raised_on_every_rank() -> None:
    class Breaks(Live):
        def load(self, manifest: Manifest, values: Sequence[Mapping[str, Any]]) -> Plan:
            plan = super().load(manifest, values)
            return BrokenPlan(plan.live, plan.step, plan.targets)

    class BrokenPlan(Plan):
        def finish(self) -> None:
            raise KeyError("scheduler")

    results = on_ranks(two_rank_store(), [rank_live(), Breaks(rank_live().tensors)])
    assert type(results[0]) is HoldfastError
    assert "Rank 1 failed to restore the state: KeyError" in str(results[0])
    assert isinstance(results[1], KeyError)


def test_a_home_that_rank_0_cannot_read_raises_on_every_rank() -> None:
    store = FaultyStore(two_rank_store())
    store.fail("get", RetryLater("no answer"), matching=names.RUN, times=None)
    results = on_ranks(store, [rank_live(), rank_live()], patience_s=0)
    assert all(isinstance(one, RetryLater) for one in results)
    assert "Rank 0 could not list" in str(results[1])


def test_a_fresh_home_is_fresh_on_every_rank() -> None:
    assert on_ranks(MemoryStore(), [rank_live(), rank_live()]) == [None, None]


def test_a_start_whose_first_checkpoint_is_damaged_on_one_rank_still_supersedes_earlier_attempts() -> None:
    """Attempt 2 began from nothing, so that its checkpoint has no ancestors."""

    class Damaged(MemoryStore):
        def get(self, name: str) -> bytes:
            if name == names.manifest(100, 2) and threading.current_thread().name.endswith("_1"):
                raise Corrupt("a bit has flipped")
            return super().get(name)

    store = Damaged()
    make_home(store)
    for step, attempt in ((200, 1), (100, 2)):
        make_checkpoint(store, step, attempt, two_ranks(step), per_rank=["own"])
    results = on_ranks(store, [rank_live(), rank_live()])
    assert all(isinstance(one, Corrupt) for one in results)
    assert "step 200, attempt 1: superseded: attempt 2 continued from step 0" in str(results[0])
