"""`torch.distributed.checkpoint` with Holdfast on several ranks: layouts, async saves, failures."""

# torch documents dcp.save and dcp.load, but does not list them as exported.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import holdfast
from adapters import sharded
from exchange.stock import load_dcp
from forkserver import forkserver
from holdfast.adapters.dcp import HoldfastReader
from holdfast.checkpoint.exchange.exporter import export_checkpoint
from holdfast.checkpoint.format.layout import EvenPartitioning, parse_header
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.store import open_store
from stage.ranks import run_ranks

pytestmark = pytest.mark.ranks


def check(found: list[Any], expected: list[Any]) -> None:
    """Assert that every rank has the values that were saved, and nothing is missing."""
    assert isinstance(expected[0], dict), expected[0]
    assert len(expected[0]) > 20
    for one in found:
        assert isinstance(one, dict), one
        assert one == expected[0]


@pytest.mark.fsdp2_on_cpu
@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ((2, "fsdp"), (1, "fsdp")),
        ((4, "hsdp"), (2, "fsdp")),
        ((2, "ddp"), (3, "fsdp")),
        ((4, "tp+fsdp"), (2, "tp")),
        pytest.param((2, "fsdp"), (4, "fsdp"), marks=pytest.mark.slow),
        pytest.param((4, "fsdp"), (2, "ddp"), marks=pytest.mark.slow),
        pytest.param((2, "tp"), (4, "tp+fsdp"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_layout_loads_a_save_of_any_other(
    tmp_path: Path, saving: tuple[int, str], loading: tuple[int, str]
) -> None:
    kept = run_ranks(saving[0], sharded.save, tmp_path, saving[1])
    found = run_ranks(loading[0], sharded.load, tmp_path, loading[1])
    check(found, kept)
    opened = holdfast.open(tmp_path)
    assert opened.world_size == saving[0]
    assert opened.verify().is_good
    kind, numbers = kept[0][".model.0.weight"]
    assert kind == "torch.float32"
    assert opened["model.0.weight"].tolist() == numbers


@pytest.mark.fsdp2_on_cpu
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp+fsdp"])
def test_all_ranks_share_one_catalog_of_rules(tmp_path: Path, layout: str) -> None:
    """The manifest does not grow with tensors times ranks; empty shards are omitted."""
    assert isinstance(run_ranks(4, sharded.save, tmp_path, layout)[0], dict)
    store = open_store(tmp_path)
    manifest = read_manifest(store, CheckpointId(attempt=1, step=5), None)
    assert len(manifest.catalogs) == 1
    partitionings = {name: tensor.partitioning for name, tensor in manifest.tensors.items()}
    assert {name for name, one in partitionings.items() if not isinstance(one, EvenPartitioning)} == set()
    assert any(isinstance(one, EvenPartitioning) and len(one.ranks) > 1 for one in partitionings.values())


@pytest.mark.fsdp2_on_cpu
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_only_parts_with_wanted_tensors_are_read(tmp_path: Path) -> None:
    """The other parts may be damaged."""
    kept = run_ranks(4, sharded.save, tmp_path, "fsdp")[0]
    partitioning = (
        read_manifest(open_store(tmp_path), CheckpointId(attempt=1, step=5), None)
        .tensors["model.2.bias"]
        .partitioning
    )
    assert partitioning is not None
    needed = {0, *partitioning.ranks}
    spoilt = [rank for rank in range(4) if rank not in needed]
    assert spoilt
    for rank in spoilt:
        (path,) = tmp_path.glob(f"step-*/rank-{rank:05d}-*.json")
        path.write_bytes(b"!" * path.stat().st_size)
    found = {"model": {"2.bias": torch.zeros(3)}}
    dcp.load(found, storage_reader=HoldfastReader(tmp_path))
    assert found["model"]["2.bias"].tolist() == kept[".model.2.bias"][1]


@pytest.mark.fsdp2_on_cpu
def test_shards_that_a_checkpointer_saved_are_loaded(tmp_path: Path) -> None:
    kept = run_ranks(3, sharded.save_by_checkpointer, tmp_path)
    assert isinstance(kept[0], dict), kept[0]
    found = run_ranks(2, sharded.load_model, tmp_path, "fsdp")
    assert found[0] == found[1] == kept[0]


@pytest.mark.fsdp2_on_cpu
def test_each_byte_is_written_once(tmp_path: Path) -> None:
    """Replicas of replicated and of sharded tensors are written by one rank."""
    assert isinstance(run_ranks(4, sharded.save, tmp_path, "hsdp")[0], dict)
    opened = holdfast.open(tmp_path)
    written = 0
    for path in tmp_path.glob("step-*/*.safetensors"):
        _, start = parse_header(path.read_bytes(), path.name)
        written += path.stat().st_size - start
    assert written == sum(opened.info(name).num_bytes for name in opened) > 1000


@pytest.mark.fsdp2_on_cpu
@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_an_async_save_has_the_state_at_its_start(tmp_path: Path, kind: str) -> None:
    """In a thread or a process, it is of the same attempt as the plain save after it."""
    kept = run_ranks(2, sharded.save_async, tmp_path, kind)
    assert isinstance(kept[0], dict), kept[0]
    opened = holdfast.open(tmp_path, step=6)
    assert opened.verify().is_good
    for name in opened:
        assert opened[name].tolist() == kept[0][f".{name}"][1], name
    assert [found.name for found in (tmp_path / "attempts").glob("a*[0-9].json")] == ["a0001.json"]
    assert holdfast.open(tmp_path).step == 7


def test_a_value_that_cannot_be_saved_is_named_on_every_rank(tmp_path: Path) -> None:
    said = run_ranks(2, sharded.save_what_cannot_be_saved, tmp_path)
    for one in said:
        assert "odd.thing is a builtins.object" in one
    with pytest.raises(holdfast.NotFound):
        holdfast.open(tmp_path)


def test_ranks_that_choose_different_checkpoints_load_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        assert isinstance(run_ranks(2, sharded.save, tmp_path, "ddp", step)[0], dict)
    for one in run_ranks(2, sharded.choose_apart, tmp_path):
        assert "The ranks have chosen different checkpoints" in one
        assert "(steps [1, 2])" in one


@pytest.mark.fsdp2_on_cpu
def test_a_save_in_which_a_rank_is_killed_leaves_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    home = tmp_path / "home"
    ranks = [
        forkserver().Process(target=sharded.fall_while_saving, args=(rank, str(tmp_path / "meet"), home))
        for rank in range(2)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(600)
    assert [one.exitcode for one in ranks] == [3, -9]
    assert list(home.glob("step-00000009/*.safetensors"))
    with pytest.raises(holdfast.NotFound):
        holdfast.open(home)


@pytest.mark.fsdp2_on_cpu
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of DCP itself
@pytest.mark.parametrize("count", [1, 2])
def test_exports_of_any_number_of_ranks_have_every_key(tmp_path: Path, count: int) -> None:
    """DCP divides values among the ranks, so none of them has all."""
    kept = run_ranks(count, sharded.save, tmp_path / "home", "fsdp")[0]
    checkpoint = holdfast.open(tmp_path / "home")
    assert {name for name in checkpoint.values() if name.startswith("extra.")} == {
        f"extra.{name}" for name in sharded.NUMBERS
    }
    export_checkpoint(checkpoint, tmp_path / "dcp", kind="dcp")
    found = sharded.make_state(layout="", trained=False)
    load_dcp(found, tmp_path / "dcp")  # by stock DCP, which fails at a missing key
    assert dict(sharded.flat(found)) == kept
    export_checkpoint(checkpoint, tmp_path / "state.pt", kind="torch")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "stock.pt")
    for name in ("state.pt", "stock.pt"):
        assert dict(sharded.flat(torch.load(tmp_path / name, weights_only=True))) == kept


def test_an_export_of_a_pipeline_has_the_optimizer_of_every_stage(tmp_path: Path) -> None:
    kept = run_ranks(2, sharded.save_stages, tmp_path / "home")
    export_checkpoint(holdfast.open(tmp_path / "home"), tmp_path / "state.pt", kind="torch")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    groups = [(group["lr"], sorted(group["params"])) for group in found["optimizer"]["param_groups"]]
    assert groups == [(0.1, ["model.0.bias", "model.0.weight"]), (1.1, ["model.2.bias", "model.2.weight"])]
    state = {name.removeprefix("model."): one for name, one in found["optimizer"]["state"].items()}
    exported = dict(sharded.flat({"model": found["model"], "state": state}))
    assert exported == {**kept[0], **kept[1]}
