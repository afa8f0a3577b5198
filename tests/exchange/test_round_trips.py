"""Checkpoints imported and exported in every format keep every bit."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import json
import pathlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import holdfast
from exchange.states import check, model, same, training
from exchange.stock import load_dcp, save_dcp
from holdfast.checkpoint.exchange.exporter import export_checkpoint
from holdfast.checkpoint.exchange.importer import import_checkpoint
from holdfast.checkpoint.format import names
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.memory import MemoryStore
from making import make_checkpoint, make_home

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of DCP itself


@pytest.fixture
def saved(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """Training state, and the file of torch.save with it."""
    state = training()
    torch.save(state, tmp_path / "state.pt")
    return state, tmp_path / "state.pt"


def imported(state: Any, folder: Path) -> Any:
    """Import a file of torch.save with a state, and open the checkpoint."""
    torch.save(state, folder / "in.pt")
    import_checkpoint(folder / "in.pt", folder / "home")
    return holdfast.open(folder / "home")


def loaded(home: Any, path: Path, **options: Any) -> Any:
    """Export a checkpoint to a file of torch.save, and load that as stock torch does."""
    export_checkpoint(holdfast.open(home), path, kind="torch", **options)
    return torch.load(path, weights_only=True)


def test_torch_files_round_trip(saved: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    state, path = saved
    done = import_checkpoint(path, tmp_path / "home", step=12)
    assert (done.kind, done.step) == ("torch", 12)
    checkpoint = holdfast.open(tmp_path / "home")
    assert checkpoint.step == 12
    assert checkpoint.verify().is_good
    assert same(checkpoint["model.layer.bfloat16"], state["model"]["layer.bfloat16"])
    assert checkpoint.info("model.head").tied_to == "model.layer.float32"
    assert checkpoint.values()["epoch"] == 7
    assert checkpoint.values()["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    export_checkpoint(checkpoint, tmp_path / "out.pt", kind="torch")
    for is_mapped in (False, True):
        found = torch.load(tmp_path / "out.pt", weights_only=True, mmap=is_mapped)
        assert set(found) == set(state)
        assert [key for key in state if not same(found[key], state[key])] == []
        assert found["model"]["head"].data_ptr() == found["model"]["layer.float32"].data_ptr()


def test_a_bare_state_dict_round_trips(tmp_path: Path) -> None:
    state = model()
    check(imported(state, tmp_path).tensors(), state)
    check(loaded(tmp_path / "home", tmp_path / "out.pt"), state)


def test_dcp_round_trips_and_stock_dcp_loads_it(tmp_path: Path) -> None:
    state = training()
    save_dcp(state, tmp_path / "in")
    done = import_checkpoint(tmp_path / "in", tmp_path / "home")
    assert done.kind == "dcp"
    checkpoint = holdfast.open(tmp_path / "home")
    assert checkpoint.verify().is_good
    check({k[6:]: t for k, t in checkpoint.tensors().items() if k.startswith("model.")}, state["model"])
    assert checkpoint.values()["scheduler"] == {"last_epoch": 3, "base": [1, 2.5, "x", None]}
    export_checkpoint(checkpoint, tmp_path / "out", kind="dcp")
    target: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()},
        "epoch": 0,
        "mixed": [torch.zeros(2), {"deep": torch.ones(1), "n": 0}],
    }
    load_dcp(target, tmp_path / "out")
    check(target["model"], state["model"])
    assert target["epoch"] == 7
    assert same(target["mixed"], state["mixed"])
    whole = []
    for name in ("in", "out"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        whole.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    assert set(whole[0]) == set(whole[1])
    assert all(same(whole[0][key], whole[1][key]) for key in whole[0])


def test_safetensors_round_trips(tmp_path: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in model().items() if name != "head"}
    save_file(state, tmp_path / "in.safetensors")
    done = import_checkpoint(tmp_path / "in.safetensors", tmp_path / "home", under="model")
    assert done.kind == "safetensors"
    checkpoint = holdfast.open(tmp_path / "home")
    check(checkpoint.tensors(), {f"model.{name}": tensor for name, tensor in state.items()})
    export_checkpoint(checkpoint, tmp_path / "out.safetensors", only=["model"], rename={"model": ""})
    check(load_file(tmp_path / "out.safetensors"), state)


@pytest.mark.parametrize("max_shard_bytes", [1, 200, "1GB"])
def test_hugging_face_folders_round_trip(tmp_path: Path, max_shard_bytes: int | str) -> None:
    state = model()
    export_checkpoint(imported(state, tmp_path), tmp_path / "hf", kind="hf", max_shard_bytes=max_shard_bytes)
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == "1GB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (len(files) > 1)
    found = [load_file(path) for path in files]
    check({name: tensor for shard in found for name, tensor in shard.items()}, state)
    done = import_checkpoint(tmp_path / "hf", tmp_path / "again")
    assert done.kind == "hf"
    check(holdfast.open(tmp_path / "again").tensors(), state)


def test_stock_torch_loads_the_hugging_face_folder_and_reshards_it(tmp_path: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in model().items()}
    export_checkpoint(imported(state, tmp_path), tmp_path / "hf", kind="hf", max_shard_bytes=100)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items() if tensor.numel()}
    reader = pytest.importorskip("torch.distributed.checkpoint.hf_storage").HuggingFaceStorageReader
    load_dcp(target, tmp_path / "hf", reader(str(tmp_path / "hf")))
    check(target, {name: state[name] for name in target})


def test_old_torch_files_and_sharded_bin_folders_are_imported(tmp_path: Path) -> None:
    """Older Hugging Face folders have pickles of torch before 1.6, and an index of several files."""
    state = {name: tensor for name, tensor in model().items() if "uint" not in name and "8" not in name}
    names = sorted(state)
    old = tmp_path / "old"
    old.mkdir()
    torch.save(state, old / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    new = tmp_path / "new"
    new.mkdir()
    for number, some in enumerate((names[:5], names[5:])):
        torch.save({name: state[name] for name in some}, new / f"pytorch_model-{number}.bin")
    weight_map = {name: f"pytorch_model-{int(i >= 5)}.bin" for i, name in enumerate(names)}
    (new / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for folder in (old, new):
        assert import_checkpoint(folder, tmp_path / f"{folder.name}-home").kind == "hf"
        check(holdfast.open(tmp_path / f"{folder.name}-home").tensors(), state)


def test_a_training_run_is_exported_so_that_torch_loads_it(tmp_path: Path) -> None:
    """The model is a state dict, the optimizer is by parameter name, and the rest are plain values."""
    linear = torch.nn.Linear(4, 3)
    net = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with holdfast.Checkpointer(tmp_path / "run", {"model": net, "optimizer": optimizer, "epoch": 3}) as ckpt:
        ckpt.save(1)
    checkpoint = holdfast.open(tmp_path / "run")
    found = loaded(tmp_path / "run", tmp_path / "all.pt")
    assert same(dict(found["model"]), dict(net.state_dict()))
    net.load_state_dict(found["model"])
    assert found["epoch"] == 3
    moments = found["optimizer"]["state"]["model.0.weight"]
    assert torch.equal(moments["exp_avg"], optimizer.state[linear.weight]["exp_avg"])
    bare = loaded(tmp_path / "run", tmp_path / "bare.pt", only=["model"], rename={"model": ""})
    assert same(bare, dict(net.state_dict()))
    export_checkpoint(checkpoint, tmp_path / "dcp", kind="dcp")
    target = {"model": {name: torch.zeros_like(t) for name, t in net.state_dict().items()}}
    load_dcp(target, tmp_path / "dcp")
    assert same(target["model"], dict(net.state_dict()))


@dataclasses.dataclass
class Config:
    lr: float
    table: torch.Tensor


class Phase(enum.Enum):
    WARM = 1


def test_an_export_has_plain_forms_and_objects_in_their_places(tmp_path: Path) -> None:
    """torch.load needs none of the program's types."""
    net = torch.nn.Linear(4, 3)
    state = {
        "gan": {"nets": [net, torch.nn.Linear(1, 1)], "seen": 2},
        "config": Config(0.5, torch.ones(2)),
        "phase": Phase.WARM,
        "args": argparse.Namespace(seed=1),
        "counts": collections.defaultdict(list, a=[Phase.WARM]),
    }
    with holdfast.Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.save(1)
    found = loaded(tmp_path / "run", tmp_path / "all.pt")
    assert found.keys() == {*state, "rng"}
    assert same(dict(found["gan"]["nets"][0]), dict(net.state_dict()))
    assert (len(found["gan"]["nets"]), found["gan"]["seen"]) == (2, 2)
    assert found["config"]["lr"] == 0.5
    assert found["config"]["table"].tolist() == [1, 1]
    assert (found["phase"], found["args"], found["counts"]) == ("WARM", {"seed": 1}, {"a": ["WARM"]})


def test_an_imported_model_is_restored_into_a_training_run(tmp_path: Path) -> None:
    old, new = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    torch.save({"state_dict": {f"net.{k}": v for k, v in old.state_dict().items()}}, tmp_path / "last.ckpt")
    import_checkpoint(tmp_path / "last.ckpt", tmp_path / "run", step=40)
    with holdfast.Checkpointer(tmp_path / "run", {"model": new}) as ckpt:
        assert ckpt.restore(only=["model"], rename={"state_dict.net": "model"}) == 40
        ckpt.save(41)
    assert torch.equal(old.weight, new.weight)
    assert holdfast.open(tmp_path / "run").step == 41


def test_a_value_with_tensors_is_imported_from_dcp(tmp_path: Path) -> None:
    """DCP stores a tuple that contains tensors as one opaque item."""
    state = {"pair": (torch.ones(2), 3), "w": torch.zeros(1)}
    save_dcp(dict(state), tmp_path / "in")
    import_checkpoint(tmp_path / "in", tmp_path / "home")
    assert same(loaded(tmp_path / "home", tmp_path / "out.pt")["pair"], state["pair"])


def test_sharded_dcp_tensors_are_joined(tmp_path: Path) -> None:
    """Chunks along both dimensions, one of them not contiguous in its item, are joined to whole tensors."""
    whole = torch.randn(6, 8)
    _save_sharded(tmp_path / "in", whole)
    import_checkpoint(tmp_path / "in", tmp_path / "home")
    assert same(holdfast.open(tmp_path / "home")["w"], whole)


def _save_sharded(folder: Path, whole: torch.Tensor) -> None:
    """Write a DCP checkpoint of one tensor in four chunks with DCP's own classes."""
    import pickle

    from torch.distributed.checkpoint import metadata as kinds
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    chunks, items = [], {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for rows in ((0, 4), (4, 2)):
            for columns in ((0, 3), (3, 5)):
                part = whole.narrow(0, *rows).narrow(1, *columns)
                data = io.BytesIO()
                torch.save(part.t().contiguous().t() if rows[0] else part.clone(), data)
                offsets = torch.Size([rows[0], columns[0]])
                chunks.append(kinds.ChunkStorageMetadata(offsets, part.size()))
                items[kinds.MetadataIndex("w", offsets, len(items))] = _StorageInfo(
                    "__0_0.distcp", file.tell(), len(data.getvalue())
                )
                file.write(data.getvalue())
    tensor = kinds.TensorStorageMetadata(kinds.TensorProperties(dtype=whole.dtype), whole.size(), chunks)
    metadata = kinds.Metadata({"w": tensor}, planner_data={"w": ("w",)}, storage_data=items)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_the_files_of_a_holdfast_step_can_be_imported(tmp_path: Path) -> None:
    """Files whose metadata describe regions are joined, like those of DCP's Hugging Face writer."""
    store = open_store(tmp_path / "run")
    make_home(store)
    whole = torch.randn(6, 8)
    left, right = (whole[:, :3], (0, 0), (6, 8)), (whole[:, 3:], (0, 3), (6, 8))
    make_checkpoint(store, 5, 1, [{"w": left, "scale": torch.tensor(2.5)}, {"w": right}])
    done = import_checkpoint(tmp_path / "run" / names.step_dir(5), tmp_path / "home")
    assert done.kind == "hf"
    check(holdfast.open(tmp_path / "home").tensors(), {"w": whole, "scale": torch.tensor(2.5)})
    check(loaded(tmp_path / "run", tmp_path / "out.pt"), {"w": whole, "scale": torch.tensor(2.5)})


@pytest.mark.parametrize("rank", [0, 1])
def test_an_export_has_what_only_other_ranks_have(tmp_path: Path, rank: int) -> None:
    """Of what several ranks have each for itself, the chosen rank's."""
    store = open_store(tmp_path / "run")
    make_home(store)
    own = [{"own": torch.tensor(float(of)), f"own_{of}": torch.tensor(float(of))} for of in range(2)]
    names_of_own = [name for tensors in own for name in tensors]
    values = [{"data": {"seen": of, f"rank_{of}": {"count": of}}, f"note_{of}": of} for of in range(2)]
    make_checkpoint(store, 5, 1, own, per_rank=names_of_own, values=values)
    checkpoint, expected = holdfast.open(tmp_path / "run"), {**own[1], **own[0], **own[rank]}
    export_checkpoint(checkpoint, tmp_path / "out.safetensors", rank=rank)
    check(load_file(tmp_path / "out.safetensors"), expected)
    found = loaded(tmp_path / "run", tmp_path / "out.pt", rank=rank)
    assert {name: found.pop(name) for name in ("note_0", "note_1")} == {"note_0": 0, "note_1": 1}
    assert found.pop("data") == {"seen": rank, "rank_0": {"count": 0}, "rank_1": {"count": 1}}
    check(found, expected)


VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "numbers": (
        [1 + 2j, 10**30, -(2**70), 1 << 8000, float("inf")],
        [1 + 2j, 10**30, -(2**70), str(1 << 8000), float("inf")],
    ),
    "bytes": ([b"", b"\x00\xff", bytearray(b"x")], [bytearray(), b"\x00\xff", bytearray(b"x")]),
    "containers": (
        [{1, 2}, collections.deque([1]), collections.OrderedDict(a=1), range(3), {(1, 2): 3}],
        [[1, 2], [1], {"a": 1}, [0, 1, 2], {(1, 2): 3}],
    ),
    "moments": (
        [datetime.datetime(2026, 1, 2), datetime.timedelta(seconds=3), pathlib.Path("x")],
        ["2026-01-02 00:00:00", 3.0, "x"],
    ),
    "arrays": ([numpy.arange(3), numpy.float32(1.5)], [[0, 1, 2], 1.5]),
    "torch": ([torch.float32, torch.Size([1, 2])], [torch.float32, (1, 2)]),
}
"""Values, and those that torch loads in their place."""


@pytest.mark.parametrize("kind", list(VALUES))
def test_values_of_every_kind_are_exported_for_weights_only_loading(tmp_path: Path, kind: str) -> None:
    store = MemoryStore()
    make_home(store)
    given, expected = VALUES[kind]
    make_checkpoint(store, 1, 1, [{}], values=[{"all": given}])
    assert loaded(store, tmp_path / "out.pt")["all"] == expected


def test_names_that_are_not_renamed_are_exported_as_they_are(tmp_path: Path) -> None:
    tensors = {".a": torch.ones(1), "a": torch.zeros(1), "..": torch.ones(2), "": torch.ones(3)}
    save_file(tensors, tmp_path / "in.safetensors")
    import_checkpoint(tmp_path / "in.safetensors", tmp_path / "home")
    export_checkpoint(holdfast.open(tmp_path / "home"), tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
