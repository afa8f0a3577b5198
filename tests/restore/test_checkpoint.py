"""`holdfast.open`: which checkpoint it opens, what can be taken out, export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoint.exchange import export_checkpoint
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.values import TensorRef
from holdfast.checkpoint.restore.checkpoint import TensorInfo
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, Unsupported
from making import LocalShard, flip, make_checkpoint, make_home, reseal
from programs import run_python

WHOLE = torch.arange(24.0).reshape(4, 6)
RANKS: list[dict[str, torch.Tensor | LocalShard]] = [
    {"model.w": torch.arange(6.0).reshape(2, 3), "rng": torch.arange(3), "s": (WHOLE[:, :2], (0, 0), (4, 6))},
    {
        "model.b": torch.tensor(7, dtype=torch.int64),
        "rng": torch.arange(4),
        "s": (WHOLE[:, 2:], (0, 2), (4, 6)),
    },
]
VALUES = [{"epoch": 3, "seen": {1, 2}, "gen": TensorRef("rng")}, {"epoch": 3, "seen": {5}}]


def make_store(store: MemoryStore | LocalStore | None = None) -> MemoryStore | LocalStore:
    store = store or MemoryStore()
    make_home(store, attempts=[1, 2])
    make_checkpoint(store, 400, 1, [{"old": torch.zeros(1)}])
    make_checkpoint(store, 500, 1, [{"old": torch.zeros(2)}])
    make_checkpoint(
        store, 450, 2, RANKS, per_rank=["rng"], tied={"head.w": "model.w"}, values=VALUES, base=(1, 400)
    )
    return store


def test_the_newest_is_of_the_newest_attempt() -> None:
    opened = open_checkpoint(make_store())
    assert (opened.step, opened.attempt, opened.world_size) == (450, 2, 2)
    assert (opened.run, opened.created) == ("run-one", 1_700_000_000.0)
    assert opened.skipped == ()


def test_a_step_and_an_attempt_can_be_chosen() -> None:
    store = make_store()
    make_checkpoint(store, 500, 2, [{"new": torch.zeros(1)}])
    assert open_checkpoint(store, 400).attempt == 1
    assert open_checkpoint(store, 500).attempt == 2
    assert open_checkpoint(store, 500, attempt=1).keys() == ["old"]
    assert open_checkpoint(store, attempt=1).step == 500


def test_a_missing_step_is_named_with_those_that_exist() -> None:
    store = make_store()
    with pytest.raises(NotFound, match=r"step 7\b.*450 \(attempt 2\), 500 \(attempt 1\), 400"):
        open_checkpoint(store, 7)
    with pytest.raises(NotFound, match="does not contain a complete checkpoint"):
        open_checkpoint(MemoryStore())


@pytest.mark.parametrize(("kind", "reason"), [(Corrupt, "not a sealed"), (Unsupported, "Upgrade")])
def test_a_manifest_that_is_damaged_or_of_a_newer_format_is_skipped(
    kind: type[Exception], reason: str
) -> None:
    store = make_store()
    if kind is Corrupt:
        store.put(names.manifest(450, 2), b"{")
    else:
        reseal(store, names.manifest(450, 2), version=3)
    opened = open_checkpoint(store)
    assert (opened.step, opened.attempt) == (500, 1)
    assert [(one.step, one.attempt) for one in opened.skipped] == [(450, 2)]
    assert reason in opened.skipped[0].reason
    with pytest.raises(kind, match=reason):
        open_checkpoint(store, 450)


def test_a_damaged_run_document_does_not_prevent_reading() -> None:
    store = make_store()
    store.put(names.RUN, b"torn")
    assert open_checkpoint(store).step == 450


def test_tensors_are_read_one_by_one_or_all_at_once() -> None:
    opened = open_checkpoint(make_store())
    assert sorted(opened.keys()) == ["head.w", "model.b", "model.w", "rng", "s"]
    assert len(opened) == 5
    assert "head.w" in opened
    assert "tail.w" not in opened
    assert torch.equal(opened["model.w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(opened["head.w"], opened["model.w"])
    assert torch.equal(opened["s"], WHOLE)
    assert opened["model.b"].shape == ()
    assert opened.tensor("rng", rank=1).tolist() == [0, 1, 2, 3]
    everything = opened.tensors(rank=1)
    assert everything["rng"].tolist() == [0, 1, 2, 3]
    assert everything["head.w"] is everything["model.w"]
    assert {key: opened[key].shape for key in opened} == {
        **{k: t.shape for k, t in everything.items()},
        "rng": (3,),
    }


def test_info_needs_no_reading() -> None:
    opened = open_checkpoint(make_store())
    info = opened.info("head.w")
    assert info == TensorInfo("F32", (2, 3), 0, "model.w")
    assert info.num_bytes == 24
    assert opened.info("s").owner == "split"
    assert opened.info("rng").owner == "each"
    assert opened.info("model.b").num_bytes == 8


def test_a_missing_tensor_is_an_error_with_similar_names() -> None:
    opened = open_checkpoint(make_store())
    with pytest.raises(NotFound, match=r"model\.v.*Did you mean.*model\.w"):
        opened["model.v"]
    with pytest.raises(NotFound, match="holds 5 others"):
        opened.info("?")


def test_a_rank_that_does_not_exist_is_refused() -> None:
    opened = open_checkpoint(make_store())
    for ask in (opened.values, opened.tensors):
        with pytest.raises(InvalidInput, match="rank 2 does not exist"):
            ask(2)


def test_a_rank_without_its_own_copy_is_named() -> None:
    store = MemoryStore()
    make_checkpoint(store, 1, 1, [{"r": torch.zeros(1)}, {}], per_rank=["r"])
    opened = open_checkpoint(store)
    assert opened.tensors(1) == {}
    with pytest.raises(NotFound, match="rank 1 saved none"):
        opened.tensor("r", rank=1)


def test_values_come_back_decoded_by_rank() -> None:
    opened = open_checkpoint(make_store())
    assert opened.values() == {"epoch": 3, "seen": {1, 2}, "gen": TensorRef("rng")}
    assert opened.values(1) == {"epoch": 3, "seen": {5}}


def test_an_export_is_one_plain_safetensors_file(tmp_path: Path) -> None:
    opened = open_checkpoint(make_store(LocalStore(tmp_path / "home")))
    out = tmp_path / "out.safetensors"
    export_checkpoint(opened, out)
    exported, expected = load_file(out), opened.tensors()
    assert exported.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(exported[key], tensor)
    with pytest.raises(Conflict, match="exists"):
        export_checkpoint(opened, out)
    export_checkpoint(opened, str(out), rank=1, overwrite=True)
    assert load_file(out)["rng"].tolist() == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out.safetensors"]


def test_a_damaged_checkpoint_leaves_no_export(tmp_path: Path) -> None:
    store = make_store()
    flip(store, names.data(450, 2, 1))
    with pytest.raises(Corrupt):
        export_checkpoint(open_checkpoint(store), tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_opening_listing_and_exporting_do_not_import_torch(tmp_path: Path) -> None:
    make_store(LocalStore(tmp_path / "home"))
    code = (
        "import sys, holdfast\n"
        "c = holdfast.open(sys.argv[1]); c.keys(); c.info('s'); c.values(); assert c.verify().is_good\n"
        "holdfast.export_checkpoint(c, sys.argv[1] + '/../out.safetensors'); print('torch' in sys.modules)"
    )
    assert run_python(code, tmp_path / "home") == "False"
    assert torch.equal(load_file(tmp_path / "out.safetensors")["s"], WHOLE)


def test_reading_a_tensor_does_not_import_what_only_training_needs(tmp_path: Path) -> None:
    make_store(LocalStore(tmp_path / "home"))
    code = (
        "import sys, holdfast; assert holdfast.open(sys.argv[1])['s'].shape == (4, 6)\n"
        "parts = {name.split('.')[1] for name in sys.modules if name.startswith('holdfast.')}\n"
        "print(sorted(parts & {'checkpointer', 'keeper', 'stage', 'state'}))"
    )
    assert run_python(code, tmp_path / "home") == "[]"
