"""The file of frozen tensors: written once, linked while it stays the same, never taken on trust."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import holdfast
from faulty_store import FaultyStore
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.layout import Shard, lay_out, whole
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.home.commit import commit
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper import Keeper, KeeperConfig, Save
from holdfast.checkpoint.keeper.persist import persist
from holdfast.checkpoint.keeper.save_files import FrozenFile
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import InvalidInput, RetryLater, Unsupported
from keeper import test_commit

NUM_ITEMS = 50_000
CATALOG = Catalog(
    {"w": Tensor("F32", (8,), whole(0), (0,)), "base": Tensor("F32", (NUM_ITEMS,), whole(0), (0,), True)}, {}
)
W_FILE = lay_out([Shard.whole("w", "F32", (8,))], 0)
BASE_FILE = lay_out([replace(Shard.whole("base", "F32", (NUM_ITEMS,)), frozen=True)], 0)


def make_config(home: str = "", attempt: int = 1) -> KeeperConfig:
    config = test_commit.make_config(home, world_size=1)
    return replace(config, attempt=attempt, keep=Keep(None))


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
def frozen(store: FaultyStore) -> FrozenFile:
    return FrozenFile(store, make_config())


def make_image(value: float = 1.0) -> bytes:
    """The image of a file with one frozen tensor."""
    return BASE_FILE.header + torch.full((NUM_ITEMS,), value).numpy().tobytes()


def persist_frozen(
    frozen: FrozenFile, step: int, value: float = 1.0, *, must_match: bool = False
) -> DataFile:
    return frozen.persist(step, memoryview(make_image(value)), must_match=must_match)


def draft(step: int, attempt: int) -> bytes:
    starts = (W_FILE.starts[0], BASE_FILE.starts[0])
    return test_commit.make_draft(
        0, catalog_text(CATALOG), step=step, attempt=attempt, world_size=1, starts=starts
    )


def save(
    store: LocalStore | FaultyStore, frozen: FrozenFile, step: int, value: float = 1.0, attempt: int = 1
) -> None:
    """A whole checkpoint, as a keeper writes it."""
    image = W_FILE.header + torch.full((8,), float(step)).numpy().tobytes()
    file = persist(store, names.data(step, attempt, 0), memoryview(image))
    frozen_file = persist_frozen(frozen, step, value)
    store.put(names.part(step, attempt, 0), parts.finish(draft(step, attempt), file, frozen_file))
    commit(store, make_config(attempt=attempt).writer, step)


def check(store: LocalStore | FaultyStore, step: int, value: float = 1.0) -> None:
    """The checkpoint of a step verifies, and holds what it should."""
    opened = holdfast.open(store, step=step)
    assert opened.verify().is_good
    assert torch.equal(opened["base"], torch.full((NUM_ITEMS,), value))
    assert torch.equal(opened["w"], torch.full((8,), float(step)))


def calls(store: FaultyStore, method: str) -> list[str]:
    """Names of the frozen files that a method was called for."""
    return [call.name for call in store.calls(method) if "frozen" in call.name]


@pytest.mark.parametrize(
    ("values", "files"),
    [
        ((1.0, 1.0, 1.0), (0, 0, 0)),
        # Only the newest is compared with: it is the one that is surely there.
        ((1.0, 2.0, 2.0, 1.0), (0, 1, 1, 2)),
    ],
)
def test_changed_tensors_are_written_and_unchanged_ones_linked(
    tmp_path: Path, values: tuple[float, ...], files: tuple[int, ...]
) -> None:
    """One inode under the names of several checkpoints, and each of them is whole."""
    store = LocalStore(tmp_path)
    frozen = FrozenFile(store, make_config())
    for step, value in enumerate(values):
        save(store, frozen, step, value)
    inodes = [(tmp_path / names.frozen(step, 1, 0)).stat().st_ino for step in range(len(values))]
    assert [list(dict.fromkeys(inodes)).index(one) for one in inodes] == list(files)
    for step, value in enumerate(values):
        check(store, step, value)


def test_the_image_is_hashed_even_if_it_is_linked(frozen: FrozenFile) -> None:
    """The hash in the part is computed from memory, so damage on the disk is found."""
    first = persist_frozen(frozen, 1)
    assert persist_frozen(frozen, 2) == first
    assert len(first.hashes) / 32 == -(-len(make_image()) // first.chunk_bytes) > 1


def test_an_image_that_was_copied_beside_training_and_differs_is_refused(
    store: FaultyStore, frozen: FrozenFile
) -> None:
    """Nothing of it is written. A later image that was copied before save() returned is accepted."""
    persist_frozen(frozen, 1)
    persist_frozen(frozen, 2, must_match=True)
    for _ in range(2):  # a second try must not compare the image with itself
        with pytest.raises(InvalidInput, match=r"Step 3 was dropped.* differ from that save's") as caught:
            persist_frozen(frozen, 3, 2.0, must_match=True)
        assert (caught.value.step, caught.value.rank) == (3, 0)
    assert store.size(names.frozen(3, 1, 0)) is None
    persist_frozen(frozen, 4, 2.0)
    persist_frozen(frozen, 5, 2.0, must_match=True)
    assert calls(store, "put") == [names.frozen(1, 1, 0), names.frozen(4, 1, 0)]


def test_a_single_flipped_bit_is_a_difference(frozen: FrozenFile) -> None:
    persist_frozen(frozen, 1)
    image = bytearray(make_image())
    image[-1] ^= 1
    with pytest.raises(InvalidInput, match="Step 2 was dropped"):
        frozen.persist(2, memoryview(image), must_match=True)


def test_without_a_previous_save_nothing_proves_that_tensors_are_unchanged(frozen: FrozenFile) -> None:
    with pytest.raises(InvalidInput, match="failed before their hashes were known"):
        persist_frozen(frozen, 1, must_match=True)
    persist_frozen(frozen, 2)
    persist_frozen(frozen, 3, must_match=True)


def test_a_save_that_the_store_rejected_is_still_compared_with(
    store: FaultyStore, frozen: FrozenFile
) -> None:
    """Its bytes were hashed: the next save, staged meanwhile, need not be dropped for it."""
    store.fail("put", RetryLater("full"))
    with pytest.raises(RetryLater):
        persist_frozen(frozen, 1, 2.0)
    with pytest.raises(InvalidInput):
        persist_frozen(frozen, 2, 3.0, must_match=True)
    persist_frozen(frozen, 2, 2.0, must_match=True)
    assert store.get(names.frozen(2, 1, 0)) == make_image(2.0)


def test_a_save_can_be_tried_again(store: FaultyStore, frozen: FrozenFile) -> None:
    """The file is there already, its part could not be written."""
    assert persist_frozen(frozen, 1) == persist_frozen(frozen, 1)
    assert store.get(names.frozen(1, 1, 0)) == make_image()


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_new_keeper_finds_the_file_of_an_earlier_one(tmp_path: Path, attempt: int) -> None:
    """Of the same attempt, when the keeper died, or of the next."""
    store = LocalStore(tmp_path)
    first = FrozenFile(store, make_config())
    save(store, first, 1, 7.0)
    save(store, first, 2)
    again = FrozenFile(store, make_config(attempt=attempt))
    persist_frozen(again, 3, must_match=attempt == 1)
    found = [tmp_path / names.frozen(2, 1, 0), tmp_path / names.frozen(3, attempt, 0)]
    assert found[0].samefile(found[1])


def test_files_of_other_ranks_and_incomplete_saves_are_skipped(
    store: FaultyStore, frozen: FrozenFile
) -> None:
    """A file without a part, a part that is damaged, a part without such a file."""
    save(store, frozen, 1)
    document = store.get(names.part(1, 1, 0))
    for step in (2, 3, 4):
        store.put(names.frozen(step, 1, 0), b"half")
    store.put(names.part(3, 1, 0), document[:-1])
    store.put(names.part(4, 1, 0), parts.finish(draft(4, 1), DataFile(0, 65536, "")))
    store.put(names.frozen(9, 1, 1), b"of another rank")
    store.clear_calls()
    persist_frozen(FrozenFile(store, make_config(attempt=2)), 5)
    assert store.get(names.frozen(5, 2, 0)) == make_image()
    assert len(calls(store, "link")) == 1
    assert not calls(store, "put")


def test_without_links_the_bytes_are_written_again(store: FaultyStore, frozen: FrozenFile) -> None:
    store.fail("link", Unsupported("no links here"), times=None)
    for step in (1, 2, 3):
        persist_frozen(frozen, step, must_match=step > 1)
        assert store.get(names.frozen(step, 1, 0)) == make_image()
    assert calls(store, "put") == [names.frozen(step, 1, 0) for step in (1, 2, 3)]


@pytest.mark.parametrize("harm", ["gone", "truncated"])
def test_a_missing_or_truncated_file_is_written_again(
    store: FaultyStore, frozen: FrozenFile, harm: str
) -> None:
    persist_frozen(frozen, 1)
    name = names.frozen(1, 1, 0)
    store.delete(name)
    if harm == "truncated":
        store.put(name, make_image()[:-1])
    persist_frozen(frozen, 2, must_match=True)
    assert store.get(names.frozen(2, 1, 0)) == make_image()


def test_a_failed_link_is_retried(store: FaultyStore, frozen: FrozenFile) -> None:
    persist_frozen(frozen, 1)
    store.fail("link", RetryLater("gone for a moment"))
    with pytest.raises(RetryLater):
        persist_frozen(frozen, 2, must_match=True)
    persist_frozen(frozen, 2, must_match=True)
    assert calls(store, "put") == [names.frozen(1, 1, 0)]
    assert store.get(names.frozen(2, 1, 0)) == make_image()


def test_deleting_an_older_checkpoint_leaves_the_newer_one_whole(tmp_path: Path) -> None:
    """Nothing refers to another checkpoint: the link is as good as the file."""
    store = LocalStore(tmp_path)
    frozen = FrozenFile(store, make_config())
    for step in (1, 2, 3):
        save(store, frozen, step)
    assert [one.step for one in Retention(store, Keep(1)).apply(CheckpointId(1, 3), (), ())] == [1, 2]
    assert not list(store.list(names.step_dir(1)))
    assert not list(store.list(names.step_dir(2)))
    check(store, 3)
    save(store, frozen, 4)
    assert (tmp_path / names.frozen(3, 1, 0)).samefile(tmp_path / names.frozen(4, 1, 0))
    check(store, 4)


# -- through a keeper's process ------------------------------------------------------------------------------


def submit(keeper: Keeper, step: int, value: float, *, is_unchanged: bool) -> Save:
    """Submit both images of a save."""
    image = W_FILE.header + torch.full((8,), float(step)).numpy().tobytes()
    return test_commit.submit_images(
        keeper, step, draft(step, 1), image, make_image(value), is_unchanged=is_unchanged
    )


def test_a_keeper_links_unchanged_files_and_refuses_torn_ones(tmp_path: Path) -> None:
    keeper = Keeper(make_config(str(tmp_path)), released=lambda _: None)
    submit(keeper, 1, 1.0, is_unchanged=False).wait_durable(600)
    submit(keeper, 2, 1.0, is_unchanged=True).wait_durable(600)
    with pytest.raises(InvalidInput, match="Step 3 was dropped"):
        submit(keeper, 3, 5.0, is_unchanged=True).wait_durable(600)
    submit(keeper, 4, 5.0, is_unchanged=False).wait_durable(600)
    keeper.close()
    store = LocalStore(tmp_path)
    for step, value in ((1, 1.0), (2, 1.0), (4, 5.0)):
        check(store, step, value)
    assert (tmp_path / names.frozen(1, 1, 0)).samefile(tmp_path / names.frozen(2, 1, 0))
    assert not (tmp_path / names.manifest(3, 1)).exists()
    merged = manifests.parse(store.get(names.manifest(4, 1)), "manifest")
    assert merged.parts[0].frozen_bytes == len(make_image())
