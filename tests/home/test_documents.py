"""Listing a home, reading its documents, finishing commits, telling dead branches."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.home.commit import recover_commit
from holdfast.checkpoint.home.documents import check_files, read_manifest, read_part
from holdfast.checkpoint.home.listing import Listing, candidates, list_home
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Corrupt, HoldfastError, NotFound, Unsupported
from making import RUN_ID, flip, make_checkpoint, make_home, reseal

TWO_RANKS = [{"a": torch.arange(10.0)}, {"b": torch.arange(4)}]
AT_5 = CheckpointId(attempt=1, step=5)
MANIFEST, DATA, PART = names.manifest(5, 1), names.data(5, 1, 1), names.part(5, 1, 1)


def make_store() -> MemoryStore:
    store = MemoryStore()
    make_home(store, attempts=[1, 2])
    return store


def recover_commits(store: Store, listing: Listing, run_id: str | None) -> list[CheckpointId]:
    """Commit every save of a listing that lacks only its manifest, and return these."""
    return [key for key, saved in sorted(listing.saved.items()) if recover_commit(store, saved, run_id)]


def check_not_committed(store: Store) -> None:
    """Recovery does not commit the save, and changes nothing."""
    before = sorted(entry.name for entry in store.list())
    assert recover_commits(store, list_home(store), RUN_ID) == []
    assert sorted(entry.name for entry in store.list()) == before


def test_a_listing_tells_what_is_there() -> None:
    store = make_store()
    make_checkpoint(store, 5, 1, TWO_RANKS)
    make_checkpoint(store, 7, 2, TWO_RANKS, commit=False)
    store.delete(names.part(7, 2, 1))
    store.put("step-00000005/notes.txt", b"mine")
    store.put("elsewhere.txt", b"not in a step directory")
    home = list_home(store)
    assert home.attempts == (1, 2)
    assert home.foreign == ("step-00000005/notes.txt",)
    assert set(home.saved) == {(1, 5), (2, 7)}
    assert home.saved[AT_5].is_committed
    assert not home.saved[CheckpointId(attempt=2, step=7)].is_committed
    assert set(home.saved[CheckpointId(attempt=2, step=7)].parts) == {0}
    assert set(home.saved[CheckpointId(attempt=2, step=7)].data) == {0, 1}
    assert home.saved[CheckpointId(attempt=2, step=7)].data[1] == store.size(names.data(7, 2, 1))
    in_step_5 = [entry.num_bytes for entry in store.list("step-00000005/") if "notes" not in entry.name]
    assert home.saved[AT_5].num_bytes == sum(in_step_5)


def test_one_step_can_be_listed_alone() -> None:
    store = make_store()
    make_checkpoint(store, 5, 1, TWO_RANKS)
    make_checkpoint(store, 6, 1, TWO_RANKS)
    home = list_home(store, step=5)
    assert set(home.saved) == {(1, 5)}


def test_a_newer_attempt_comes_before_a_greater_step() -> None:
    store = make_store()
    for step, attempt in [(500, 1), (300, 1), (400, 2), (310, 2)]:
        make_checkpoint(store, step, attempt, TWO_RANKS)
    make_checkpoint(store, 600, 2, TWO_RANKS, commit=False)
    assert candidates(list_home(store)) == [(2, 400), (2, 310), (1, 500), (1, 300)]


def test_an_unused_home_has_no_run_and_no_candidates() -> None:
    store = MemoryStore()
    assert read_run(store) is None
    assert candidates(list_home(store)) == []


def test_the_run_is_read_and_its_damage_found() -> None:
    store = make_store()
    assert read_run(store) == run.Run(RUN_ID, 1_700_000_000.0)
    alone = MemoryStore()
    alone.put(names.RUN, store.get(names.RUN))
    flip(alone, names.RUN, 60)
    with pytest.raises(Corrupt, match="seal"):
        read_run(alone)


def test_a_lost_or_damaged_run_document_makes_no_checkpoint_a_strangers() -> None:
    store = make_store()
    make_checkpoint(store, 5, 1, TWO_RANKS)
    store.put(names.RUN, b"rubbish")
    found = read_run(store)
    assert found is not None
    assert found.id == RUN_ID
    store.delete(names.RUN)
    claim = run.AttemptClaim(9, RUN_ID, 2, "host", 17, 1_600_000_000.0)
    store.put(names.attempt(9), run.document(claim))
    assert read_run(store) == run.Run(RUN_ID, 1_600_000_000.0)


def test_a_manifest_is_read_back_as_it_was_merged() -> None:
    store = make_store()
    made = make_checkpoint(store, 5, 1, TWO_RANKS)
    assert read_manifest(store, AT_5, RUN_ID) == made
    assert read_manifest(store, AT_5, None) == made


def with_row(row: list[object]) -> Callable[[Store], object]:
    """A harm to a manifest: its catalog has this row of a tensor."""

    def harm(store: Store) -> None:
        body = json.loads(read_manifest(store, AT_5, None).catalogs[0])
        body["tensors"]["a"] = row
        reseal(store, MANIFEST, catalog=dumps(body))

    return harm


@pytest.mark.parametrize(
    ("harm", "error", "match"),
    [
        *(
            (lambda store, length=length: store.put(MANIFEST, store.get(MANIFEST)[:length]), Corrupt, None)
            for length in (0, 1, 40, 200)
        ),
        (partial(reseal, name=MANIFEST, run="run-two"), Corrupt, "belongs to another run"),
        (partial(reseal, name=MANIFEST, step=6), Corrupt, "the manifest of step 6, attempt 1, under a wrong"),
        (partial(reseal, name=MANIFEST, version=1000), Unsupported, "Upgrade"),
        (partial(reseal, name=MANIFEST, each={"a": ["F7", [10]]}), Corrupt, None),
        (partial(reseal, name=MANIFEST, each={"a": ["F32", [-1]]}), Corrupt, None),
        (partial(reseal, name=MANIFEST, world_size=3), Corrupt, None),
        (partial(reseal, name=MANIFEST, parts=[]), Corrupt, None),
        (with_row(["F32", [10], 2, 1, 0]), Corrupt, None),
        (with_row(["F32", [10], "somebody", 0, 0]), Corrupt, None),
        (with_row(["F7", [10], 0, 0, 0]), Corrupt, None),
        (with_row(["F32", [-1], 0, 0, 0]), Corrupt, None),
    ],
)
def test_a_manifest_that_cannot_be_is_refused_though_it_is_sealed(
    harm: Callable[[Store], object], error: type[HoldfastError], match: str | None
) -> None:
    store = make_store()
    make_checkpoint(store, 5, 1, TWO_RANKS)
    harm(store)
    with pytest.raises(error, match=match):
        read_manifest(store, AT_5, RUN_ID)


def test_missing_and_truncated_files_are_named() -> None:
    store = make_store()
    made = make_checkpoint(store, 5, 1, TWO_RANKS)
    check_files([list_home(store)], made)
    data, part = names.data(5, 1, 1), names.part(5, 1, 0)
    image, document = store.get(data), store.get(part)

    store.put(data, image[:-1])
    with pytest.raises(
        Corrupt, match=f"truncated: expected {len(image)} bytes, found {len(image) - 1}"
    ) as caught:
        check_files([list_home(store)], made)
    assert (caught.value.key, caught.value.rank, caught.value.step) == (data, 1, 5)

    store.put(data, image + b"!")
    with pytest.raises(Corrupt, match="too long"):
        check_files([list_home(store)], made)

    store.delete(data)
    with pytest.raises(NotFound, match="missing") as missing:
        check_files([list_home(store)], made)
    assert missing.value.key == data

    store.put(data, image)
    store.put(part, document[:-3])
    with pytest.raises(Corrupt) as short:
        check_files([list_home(store)], made)
    assert short.value.key == part


def test_a_part_that_was_not_committed_is_refused_though_it_is_sealed() -> None:
    store = make_store()
    made = make_checkpoint(store, 5, 1, TWO_RANKS, values=[{"x": 1}, {"x": 2}])
    assert read_part(store, made, 1).values == {"x": 2}
    reseal(store, names.part(5, 1, 1), values={"x": 3})
    with pytest.raises(Corrupt, match="not the part that was committed"):
        read_part(store, made, 1)


@pytest.mark.parametrize(
    "facts",
    [
        {"starts": [1 << 40]},
        {"starts": [-8]},
        {"starts": []},
        {"starts": [4096, 4096]},
        {"own": [["c", "I64", [4], 1 << 40]]},
        {"own": [["c", "I64", [4], -8]]},
        {"own": [["c", "I64", [-4], 4096]]},
        {"own": [["c", "Q9", [4], 4096]]},
        {"own": [["b", "I64", [4], 4096]]},
    ],
)
def test_a_part_that_points_out_of_its_file_is_not_committed(facts: dict[str, Any]) -> None:
    store = make_store()
    make_checkpoint(store, 5, 1, TWO_RANKS, commit=False)
    reseal(store, PART, **facts)
    check_not_committed(store)


BOXES: list[object] = [
    *(
        {"boxes": [[1, [2], [4]]]},
        {"boxes": [[1, [0], [-4]]]},
        {"boxes": [[1, [-1], [5]]]},
        {"boxes": [[1, [], []]]},
    ),
    *(
        {"splits": [[0, 0]], "ranks": [1]},
        {"splits": [[1, 1]], "ranks": [1]},
        {"splits": [[0, 2]], "ranks": [1]},
    ),
    {"splits": [], "ranks": [7]},
]


@pytest.mark.parametrize("cut", BOXES, ids=str)
def test_parts_with_a_cut_that_cannot_be_are_not_committed(cut: object) -> None:
    """All parts say so, and are sealed."""
    store = make_store()
    made = make_checkpoint(store, 5, 1, TWO_RANKS, commit=False)
    body = json.loads(made.catalogs[0])
    body["cuts"][body["tensors"]["b"][2]] = cut
    for rank in (0, 1):
        reseal(store, names.part(5, 1, rank), catalog=dumps(body))
    check_not_committed(store)


def test_a_file_of_frozen_tensors_belongs_to_its_checkpoint() -> None:
    """It is listed, must be there with its size, and a save without it is not completed."""
    store = make_store()
    made = make_checkpoint(store, 5, 1, TWO_RANKS, frozen=["b"], commit=False)
    name = names.frozen(5, 1, 1)
    image = store.get(name)
    saved = list_home(store).saved[AT_5]
    assert saved.frozen == {1: len(image)}
    assert saved.num_bytes == sum(entry.num_bytes for entry in store.list("step-"))
    for harm, says in ((None, "missing"), (image[:-1], "truncated"), (image + b"!", "too long")):
        store.delete(name)
        if harm is not None:
            store.put(name, harm)
        with pytest.raises((Corrupt, NotFound), match=says) as caught:
            check_files([list_home(store)], made)
        assert (caught.value.key, caught.value.rank) == (name, 1)
        assert recover_commits(store, list_home(store), RUN_ID) == []
    store.put(name, image)
    check_files([list_home(store)], made)
    assert recover_commits(store, list_home(store), RUN_ID) == [(1, 5)]


def test_a_save_without_only_its_manifest_is_committed() -> None:
    store = make_store()
    make_checkpoint(store, 4, 1, TWO_RANKS)
    expected = make_checkpoint(store, 5, 1, TWO_RANKS, commit=False)
    assert recover_commits(store, list_home(store), RUN_ID) == [(1, 5)]
    found = read_manifest(store, AT_5, RUN_ID)
    assert (found.parts, found.tensors) == (expected.parts, expected.tensors)
    assert len(found.id) == 32
    assert recover_commits(store, list_home(store), RUN_ID) == []


@pytest.mark.parametrize(
    "harm",
    [
        *("no part", "no data", "neither", "short data", "torn part"),
        *("other run", "newer part", "boundless chunks"),
    ],
)
def test_a_save_that_lacks_more_is_not_committed(harm: str) -> None:
    store = make_store()
    given = {"other run": {"run_id": "x"}, "boundless chunks": {"chunk_bytes": 1 << 30}}.get(harm, {})
    make_checkpoint(store, 5, 1, TWO_RANKS, commit=False, **given)
    if harm in ("no part", "neither"):
        store.delete(PART)
    if harm in ("no data", "neither"):
        store.delete(DATA)
    if harm == "short data":
        store.put(DATA, store.get(DATA)[:-1])
    if harm == "torn part":
        store.put(PART, store.get(PART)[:-1])
    if harm == "newer part":
        reseal(store, PART, version=9)
    check_not_committed(store)


def test_a_commit_that_somebody_else_finished_counts_as_finished() -> None:
    store = make_store()
    make_checkpoint(store, 5, 1, TWO_RANKS, commit=False)
    home = list_home(store)
    make_checkpoint(store, 5, 1, TWO_RANKS, id="the keeper's")
    assert recover_commits(store, home, RUN_ID) == [(1, 5)]
    assert read_manifest(store, AT_5, RUN_ID).id == "the keeper's"
