"""The golden homes load for ever, with exactly these contents."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

import holdfast
from checkpointer.sampling import SkippingSampler
from format.equality import same
from golden.make_homes import METRICS, NAMES_OF_RECORDS, RECORDS, REGIONS, TYPES, VALUES, state_of_regions
from holdfast.adapters.dcp import HoldfastReader
from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.sections import Mark
from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.home.rollbacks import read_rollbacks
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.state import tensors
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import Unsupported
from holdfast.watch.report.summary import read_summary
from making import raw_bytes

GOLDEN = Path(__file__).parent / "homes"

# Of three elements each, whose bytes are 1, 2, 3, ...
DTYPES = {
    **{"F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "C64": torch.complex64},
    **{"F32": torch.float32, "I32": torch.int32, "U32": torch.uint32, "F16": torch.float16},
    **{"BF16": torch.bfloat16, "I16": torch.int16, "U16": torch.uint16, "F8_E4M3": torch.float8_e4m3fn},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": getattr(torch, "float8_e8m0fnu", None)},
    **{"I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool},
}


def is_known(tensor: str) -> bool:
    """Return whether this torch has the dtype after which a tensor is named."""
    return DTYPES.get(tensor.removeprefix("dtype."), torch.uint8) is not None


def test_the_files_are_small_and_all_there() -> None:
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert len(files) == 103
    assert sum(path.stat().st_size for path in files) < 480 << 10


def test_all_documents_have_version_1() -> None:
    documents = [path.read_bytes()[:120] for path in GOLDEN.rglob("*.json")]
    assert len(documents) == 69
    assert all(b'"version":1,' in document for document in documents)


@pytest.mark.parametrize(
    "home", ["one-rank", "two-ranks", "sharded", "frozen", "types", "several-regions", "run"]
)
def test_every_byte_verifies(home: str) -> None:
    opened = open_checkpoint(GOLDEN / home)
    report = opened.verify()
    assert report.is_good
    assert report.extra == ()
    assert report.num_bytes == opened.manifest.data_bytes > 8192


def test_the_facts_of_one_rank() -> None:
    opened = open_checkpoint(GOLDEN / "one-rank")
    assert (opened.step, opened.attempt, opened.world_size) == (7, 1, 1)
    assert (opened.run, opened.created) == ("golden-one", 1_700_000_000.0)
    assert opened.manifest.id == "golden-one-7-1"
    assert opened.manifest.ancestors == ()
    store = LocalStore(GOLDEN / "one-rank")
    assert read_run(store) == run.Run("golden-one", 1_700_000_000.0)
    done = run.parse(run.Done, store.get(names.DONE), names.DONE)
    assert done == run.Done("golden-one", 1, 7, 1_700_000_060.0)
    claim = run.parse(run.AttemptClaim, store.get(names.attempt(1)), "claim")
    assert claim == run.AttemptClaim(1, "golden-one", 1, "host", 1001, 1_700_000_001.0)


def test_the_metrics_of_one_rank() -> None:
    assert same(open_checkpoint(GOLDEN / "one-rank").metrics(), METRICS)


def test_the_tensors_of_one_rank() -> None:
    opened = open_checkpoint(GOLDEN / "one-rank")
    assert opened.keys() == ["model.weight", "data.table"]
    expected = torch.tensor([[0.0, 0.25, 0.5], [0.75, 1.0, 1.25]])
    assert torch.equal(opened["model.weight"], expected)
    assert torch.equal(opened["data.table"], torch.arange(18_000, dtype=torch.int32))


@pytest.mark.parametrize(("home", "expected"), [("one-rank", VALUES), ("types", TYPES)])
def test_a_value_of_every_tag_and_of_named_types(home: str, expected: dict[str, Any]) -> None:
    assert same(open_checkpoint(GOLDEN / home).values(0), expected)


def test_the_facts_of_two_ranks() -> None:
    opened = open_checkpoint(GOLDEN / "two-ranks")
    assert (opened.step, opened.attempt, opened.world_size) == (12, 2, 2)
    assert opened.manifest.ancestors == ((1, 10),)
    assert opened.manifest.tied == {"head": "dtype.F32"}
    assert opened.values(0) == {"epoch": 1, "rank": 0}
    assert opened.values(1) == {"epoch": 1, "rank": 1}
    older = open_checkpoint(GOLDEN / "two-ranks", 10)
    assert older.attempt == 1
    assert {key: tensor.tolist() for key, tensor in older.tensors().items()} == {"w": [1, 1], "v": [0, 0]}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    opened = open_checkpoint(GOLDEN / "two-ranks")
    if dtype is None:
        with pytest.raises(Unsupported, match="Install a newer torch"):
            opened[f"dtype.{name}"]
        return
    found = opened[f"dtype.{name}"]
    expected = b"\1\0\1" if dtype is torch.bool else bytes(range(1, 3 * dtype.itemsize + 1))
    assert (found.dtype, found.shape, raw_bytes(found)) == (dtype, (3,), expected)


def test_a_dtype_that_this_torch_lacks_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As float8_e8m0fnu on torch 2.6; the other tensors are read."""
    monkeypatch.delitem(tensors._TORCH, "F8_E8M0", raising=False)
    opened = open_checkpoint(GOLDEN / "two-ranks")
    match = r"saved as F8_E8M0 \(torch.float8_e8m0fnu\).*Install a newer torch"
    with pytest.raises(Unsupported, match=match):
        opened["dtype.F8_E8M0"]
    assert opened["scalar"].item() == 2.5


def test_shapes_ties_splits_and_tensors_per_rank() -> None:
    opened = open_checkpoint(GOLDEN / "two-ranks")
    grid = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert opened["columns"].tolist() == opened["rows"].tolist() == grid
    assert opened["columns"].dtype == torch.int16
    assert opened["empty"].shape == (0, 3)
    assert opened["scalar"].shape == ()
    assert opened["scalar"].item() == 2.5
    assert raw_bytes(opened["head"]) == raw_bytes(opened["dtype.F32"])
    assert opened.tensor("rng", rank=0).tolist() == [0, 1, 2, 3]
    assert opened.tensor("rng", rank=1).tolist() == [100, 101, 102, 103, 104]
    assert opened.info("rng").owner == "each"
    assert opened.info("rows").owner == opened.info("columns").owner == "split"
    assert opened.info("scalar").owner == 1


def test_a_stock_safetensors_reader_reads_the_data_files() -> None:
    path = GOLDEN / "two-ranks" / names.data(12, 2, 1)
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys() if is_known(name)}  # noqa: SIM118
    assert found["scalar"].item() == 2.5
    assert found["rng@r1"].tolist() == [100, 101, 102, 103, 104]
    assert found["columns"].tolist() == [[2, 3], [6, 7], [10, 11]]


def test_tensors_cut_by_rules() -> None:
    """Whole, although four ranks wrote regions: short and empty ones, strided ones, two of four ranks."""
    opened = open_checkpoint(GOLDEN / "sharded")
    assert (opened.step, opened.attempt, opened.world_size) == (30, 3, 4)
    assert opened.manifest.ancestors == ((1, 10), (2, 20))
    shapes = {"rows": (10, 3), "mesh": (5, 6), "strided": (10,), "one.group": (2, 5), "short": (2,)}
    for name, shape in shapes.items():
        found = opened[name]
        assert (found.dtype, tuple(found.shape)) == (torch.int32, shape)
        assert found.flatten().tolist() == list(range(found.numel()))
        assert opened.info(name).owner == "split"
    assert opened["listed"].tolist() == [0, 1, 2, 3]
    assert opened["scalar"].item() == 2.5
    assert torch.equal(opened["head"], opened["mesh"])
    assert [opened.values(rank) for rank in range(4)] == [{"rank": rank} for rank in range(4)]


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("rows", 3, [[27, 28, 29]]),
        ("rows", 0, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ("mesh", 2, [[18, 19, 20], [24, 25, 26]]),
        ("strided", 2, [3, 4]),
        ("strided", 1, [5, 6, 7]),
        ("one.group", 3, [[0, 1, 2], [5, 6, 7]]),
        ("short", 3, [0]),
        ("short", 1, []),
    ],
)
def test_each_rank_wrote_its_region(name: str, rank: int, expected: list[object]) -> None:
    """Told by a stock reader of its file: the rule by which a tensor is cut may never change."""
    assert load_file(GOLDEN / "sharded" / names.data(30, 3, rank))[name].tolist() == expected


def test_frozen_tensors_are_in_a_file_of_their_own() -> None:
    for step in (1, 2):
        opened = open_checkpoint(GOLDEN / "frozen", step)
        assert opened["adapter"].tolist() == [step] * 4
        assert opened["head"].tolist() == [step, step + 1]
        assert torch.equal(opened["base"], torch.arange(500, dtype=torch.int16))
        assert torch.equal(opened["alias"], opened["base"])
        assert opened["split.base"].tolist() == [0, 0, 1, 1, 1]
        frozen = {name for name, tensor in opened.manifest.tensors.items() if tensor.frozen}
        assert frozen == {"base", "split.base"}
    folder = GOLDEN / "frozen"
    assert set(load_file(folder / names.data(2, 1, 0))) == {"adapter"}
    assert set(load_file(folder / names.frozen(2, 1, 0))) == {"base", "split.base"}
    assert set(load_file(folder / names.frozen(2, 1, 1))) == {"split.base"}


@pytest.mark.parametrize(("name", "record"), list(zip(NAMES_OF_RECORDS, RECORDS, strict=True)))
def test_a_record_of_each_kind(name: str, record: run.Saved) -> None:
    assert run.parse(type(record), LocalStore(GOLDEN / "two-ranks").get(name), name) == record


def test_ranks_with_several_regions_of_a_tensor() -> None:
    opened, state = open_checkpoint(GOLDEN / "several-regions"), state_of_regions()
    assert opened.world_size == len(REGIONS)
    for name in ("w", "b"):
        assert torch.equal(opened[name], state[name])
    found = {"w": torch.zeros(10, 4), "b": torch.zeros(10, dtype=torch.int16), "note": ""}
    load(found, storage_reader=HoldfastReader(GOLDEN / "several-regions"))
    assert found["note"] == state["note"]
    assert torch.equal(found["w"], state["w"])


def test_the_findings_of_watches() -> None:
    """In the manifest and the parts of a run with the watches that compare, check and go back."""
    opened = open_checkpoint(GOLDEN / "run")
    sections = opened.manifest.watches
    assert (opened.step, opened.attempt, opened.manifest.health.healthy) == (64, 2, True)
    assert {name: (one.version, one.mark) for name, one in sections.items()} == {
        "finite-values": (1, Mark.FOR),
        "replicas": (1, Mark.NONE),
        "spike": (1, Mark.FOR),
    }
    assert sections["replicas"].reasons == ("4 replicated tensors compared and equal on all ranks",)
    assert opened.metrics() == {"loss": 1.0}


def test_the_rollback_and_the_end_of_a_run() -> None:
    store = LocalStore(GOLDEN / "run")
    (rollback,) = read_rollbacks([store], None).found
    assert (rollback.base, rollback.first_step, rollback.last_step) == ((1, 40), 51, 54)
    assert rollback.skipped == {"data": (320, 432)}
    assert run.parse(run.Done, store.get(names.DONE), names.DONE).step == 64
    summary = read_summary(store)
    assert len(summary.attempts) == 2


def test_the_run_continues_from_its_last_step(tmp_path: Path) -> None:
    """Bits of parameters and momentum, and the position in the data."""
    home = tmp_path / "run"
    shutil.copytree(GOLDEN / "run", home)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    data = SkippingSampler(8)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with holdfast.Checkpointer(home, state, quiet=True) as ckpt:
        assert ckpt.restore() == 64
    opened = open_checkpoint(home, 64)
    for name, tensor in model.state_dict().items():
        assert raw_bytes(tensor) == raw_bytes(opened[f"model.{name}"])
    assert raw_bytes(optimizer.state[model.weight]["momentum_buffer"]) == raw_bytes(
        opened["optimizer.state.model.weight.momentum_buffer"]
    )
    assert (optimizer.param_groups[0]["lr"], data.position, data.skipped) == (0.01, 624, ((320, 432),))
