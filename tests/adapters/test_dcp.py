"""`torch.distributed.checkpoint` with Holdfast in one process: saves, loads, refusals and searches."""

# torch documents dcp.save and dcp.load, but does not list them as exported.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from adapters import sharded
from adapters.damage import flip, middle
from adapters.regions import save_regions
from adapters.sharded import NUMBERS, flat, make_state
from forkserver import forkserver
from holdfast import cli
from holdfast.adapters.dcp import HoldfastReader, HoldfastWriter
from holdfast.adapters.dcp.target import Target
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.value_index import ValueIndex
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import ResumeWarning, SaveWarning

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(state: dict[str, Any], home: Path, step: int | None, **options: Any) -> None:
    dcp.save(state, storage_writer=HoldfastWriter(home, step=step, **options))


def fill(home: Path, *steps: int, **options: Any) -> None:
    """Save each step with its number as "x"."""
    for step in steps:
        save({"x": torch.full((2,), float(step))}, home, step, **options)


def load(into: dict[str, Any], home: Path, **options: Any) -> dict[str, Any]:
    """Load a checkpoint into a state, and return the state."""
    dcp.load(into, storage_reader=HoldfastReader(home, **options))
    return into


def number(home: Path) -> list[float]:
    """Return the value of "x" in the newest checkpoint."""
    return load({"x": torch.zeros(2)}, home)["x"].tolist()


def test_a_nested_state_round_trips(tmp_path: Path) -> None:
    saved, found = make_state(layout="", trained=True), make_state(layout="", trained=False)
    assert dict(flat(found)) != dict(flat(saved))
    save(saved, tmp_path, 5)
    assert dict(flat(load(found, tmp_path))) == dict(flat(saved))


def test_a_save_is_an_ordinary_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = make_state(layout="", trained=True)
    save(state, tmp_path, 5)
    found = holdfast.open(tmp_path)
    assert (found.step, found.attempt, found.world_size) == (5, 1, 1)
    assert found.verify().is_good
    assert torch.equal(found["model.0.weight"], state["model"]["0.weight"])
    assert found.values()["extra.betas"] == NUMBERS["betas"]
    assert cli.main(["ls", str(tmp_path)]) == 0
    assert cli.main(["verify", str(tmp_path)]) == 0
    assert cli.main(["show", str(tmp_path)]) == 0
    assert "complete, newest" in capsys.readouterr().out


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    save({"x": torch.ones(2), **NUMBERS, "pair": (1, {2})}, tmp_path, 5)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".safetensors"}
    for path in files:
        assert b"PK\x03\x04" not in path.read_bytes()
        if path.suffix == ".json":
            assert [json.loads(line) for line in path.read_bytes().split(b"\n")]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, 3),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.ones(4).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}".replace("torch.", ""),
)
def test_every_kind_of_tensor_round_trips(tmp_path: Path, tensor: torch.Tensor) -> None:
    save({"x": tensor}, tmp_path, 1)
    found = {"x": torch.zeros(tensor.shape, dtype=tensor.dtype)}
    dcp.load(found, storage_reader=HoldfastReader(tmp_path))
    assert found["x"].dtype is tensor.dtype
    assert (
        torch.equal(found["x"].nan_to_num(7), tensor.nan_to_num(7))
        if tensor.is_floating_point() and (tensor.element_size() > 1)
        else torch.equal(found["x"].to(torch.complex64), tensor.to(torch.complex64))
    )


def test_metadata_lists_tensors_values_and_paths(tmp_path: Path) -> None:
    save({"a": {"b.c": torch.ones(2, 3)}, "items": [torch.ones(1), 5]}, tmp_path, 1)
    found = HoldfastReader(tmp_path).read_metadata()
    entries = found.state_dict_metadata
    assert set(entries) == {"a.b.c", "items.0", "items.1"}
    tensor = entries["a.b.c"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert (tensor.size, tensor.properties.dtype, len(tensor.chunks)) == ((2, 3), torch.float32, 1)
    assert isinstance(entries["items.1"], BytesStorageMetadata)
    assert found.planner_data == {"a.b.c": ("a", "b.c"), "items.0": ("items", 0), "items.1": ("items", 1)}


def test_a_state_can_be_rebuilt_from_the_checkpoint_alone(tmp_path: Path) -> None:
    """DCP's converters use its planner for this."""
    saved = {"a": {"b.c": torch.ones(2, 3), "d": {"e": 1}}, "items": [torch.ones(1), 5]}
    save(saved, tmp_path, 1)
    found: dict[str, Any] = {}
    _load_state_dict(found, HoldfastReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert dict(flat(found)) == dict(flat(saved))


def test_the_tensors_of_a_checkpointer_can_be_loaded(tmp_path: Path) -> None:
    """Also aliases, and frozen tensors, which are in a second file."""
    model = torch.nn.ModuleDict({"frozen": torch.nn.Linear(3, 2), "trained": torch.nn.Linear(3, 2)})
    model["alias"] = model["frozen"]
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(model["trained"].parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(tmp_path, state, watches=[holdfast.Preemption(signals=False)]) as ckpt:
        ckpt.save(3)
    assert len(list(tmp_path.glob("step-*/*.safetensors"))) == 2
    names = ("frozen.weight", "alias.weight", "trained.weight")
    found = load({"model": {name: torch.zeros(2, 3) for name in names}}, tmp_path)
    for name in names:
        assert torch.equal(found["model"][name], model.state_dict()[name]), name


def save_elsewhere(home: Path, step: int, kill_at: str = "") -> int | None:
    """Return the exit status of another process that saves `step`, killed at a failpoint if given."""
    child = forkserver().Process(target=sharded.save_in_one_process, args=(home, step, kill_at))
    child.start()
    child.join(600)
    return child.exitcode


# -- steps, attempts, ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/runs/gpt/step-500", ("/runs/gpt", 500)),
        ("/runs/gpt/step-00000500/", ("/runs/gpt", 500)),
        ("/step-7", ("/", 7)),
        ("/runs/gpt", ("/runs/gpt", 3)),
        ("/runs/step-5/model", ("/runs/step-5/model", 3)),
        ("memory://gpt/step-2", ("memory://gpt", 2)),
    ],
)
def test_a_checkpoint_id_is_a_home_and_optionally_a_step(text: str, expected: tuple[str, int]) -> None:
    found = Target.of("/home", 3).at(text)
    assert (found.home, found.step) == expected


def test_a_checkpoint_id_overrides_the_arguments_for_one_save(tmp_path: Path) -> None:
    writer = HoldfastWriter(tmp_path / "a", step=1)
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "b" / "step-7", storage_writer=writer)
    assert holdfast.open(tmp_path / "b").step == 7
    assert not (tmp_path / "a").exists()
    found = {"x": torch.zeros(2)}
    reader = HoldfastReader(tmp_path / "a")
    dcp.load(found, checkpoint_id=str(tmp_path / "b" / "step-7"), storage_reader=reader)
    assert found["x"].tolist() == [1, 1]
    assert reader.step == 7


def test_a_save_without_a_step_takes_the_step_after_the_newest(tmp_path: Path) -> None:
    writer = HoldfastWriter(tmp_path)
    assert writer.step is None
    steps = []
    for value in (1.0, 2.0):
        dcp.save({"x": torch.full((2,), value)}, storage_writer=writer)
        steps.append(writer.step)
    assert steps == [1, 2]
    for before in (10, 7):  # also after going back
        fill(tmp_path, before)
        dcp.save({"x": torch.full((2,), 4.0)}, storage_writer=HoldfastWriter(tmp_path))
        assert (holdfast.open(tmp_path).step, number(tmp_path)) == (before + 1, [4, 4])


def test_files_in_memory_round_trip(tmp_path: Path) -> None:
    saved = io.BytesIO()
    torch.save({"a": 1}, saved)
    saved.seek(7)
    save({"blob": saved}, tmp_path, 1)
    found = load({"blob": io.BytesIO()}, tmp_path)["blob"]
    assert (found.getvalue(), found.tell()) == (saved.getvalue(), 7)


@pytest.mark.parametrize("step", [-1, True, 2.5])
def test_an_invalid_step_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(holdfast.InvalidInput, match="step=: a step is a whole number"):
        HoldfastWriter(tmp_path, step=step)


def test_steps_of_one_trainer_are_one_attempt(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    assert [found.name for found in (tmp_path / "attempts").glob("a*[0-9].json")] == ["a0001.json"]
    assert number(tmp_path) == [3, 3]


def test_saving_an_earlier_step_again_supersedes_later_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, 1, 2, 3)
    first = {path: path.read_bytes() for path in (tmp_path / "step-00000002").iterdir()}
    with pytest.warns(SaveWarning, match=r"already has a checkpoint of step 2.*overwrite=False"):
        save({"x": torch.full((2,), 20.0)}, tmp_path, 2)
    assert number(tmp_path) == [20, 20]
    assert {path: path.read_bytes() for path in first} == first, "the files of the first are as they were"
    capsys.readouterr()
    cli.main(["ls", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "2 superseded not shown" in shown, "3, and the 2 before"
    assert holdfast.open(tmp_path).attempt == 2


def test_with_overwrite_false_a_checkpoint_is_saved_once(tmp_path: Path) -> None:
    """Without a step, a home takes one, as a folder of DCP's own files does."""
    fill(tmp_path, 1, 2, overwrite=False)
    attempts = list((tmp_path / "attempts").iterdir())
    for step, named in ((2, 2), (1, 1), (None, 2)):
        with pytest.raises(CheckpointException, match=rf"Checkpoint already exists: .* has step {named}"):
            save({"x": torch.zeros(2)}, tmp_path, step, overwrite=False)
    assert number(tmp_path) == [2, 2]
    assert list((tmp_path / "attempts").iterdir()) == attempts
    (manifest,) = (tmp_path / "step-00000002").glob("manifest-*")
    manifest.unlink()  # an incomplete save may be repeated
    save({"x": torch.zeros(2)}, tmp_path, 2, overwrite=False)
    assert number(tmp_path) == [0, 0]


@pytest.mark.filterwarnings("ignore:.*already has a checkpoint:holdfast.errors.SaveWarning")
def test_going_back_twice_continues_the_line_of_the_newest(tmp_path: Path) -> None:
    """An attempt continues one checkpoint of one attempt, not others with the same step."""
    fill(tmp_path, 1, 2, 3)
    for step in (2, 4):
        save({"x": torch.full((2,), 10.0 * step)}, tmp_path, step)
    save({"x": torch.full((2,), 300.0)}, tmp_path, 3)
    store = open_store(tmp_path)
    found = {key: read_manifest(store, key, None).ancestors for key in candidates(list_home(store))}
    assert found == {
        (1, 1): (),
        (1, 2): (),
        (1, 3): (),
        (2, 2): ((1, 1),),
        (2, 4): ((1, 1),),
        (3, 3): ((1, 1), (2, 2)),
    }


def test_a_new_trainer_continues_the_newest_line(tmp_path: Path) -> None:
    for step in (1, 2):
        assert save_elsewhere(tmp_path, step) == 0
    fill(tmp_path, 3, 4)
    store = open_store(tmp_path)
    for step in (3, 4):
        assert read_manifest(store, CheckpointId(attempt=3, step=step), None).ancestors == ((1, 1), (2, 2))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    fill(tmp_path, *range(1, 6), keep=2)
    left = sorted(path.name for path in tmp_path.glob("step-*") if list(path.iterdir()))
    assert left == ["step-00000004", "step-00000005"]
    assert number(tmp_path) == [5, 5]


def test_a_save_raises_after_another_trainer_has_taken_over_the_home(tmp_path: Path) -> None:
    save({"x": torch.ones(2)}, tmp_path, 1)
    assert save_elsewhere(tmp_path, 2) == 0
    with pytest.raises(CheckpointException, match="Attempt 2 has taken over this home"):
        save({"x": torch.ones(2)}, tmp_path, 3)


def test_a_writer_can_be_pickled(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(HoldfastWriter(tmp_path, step=4, keep=holdfast.Keep(last=2))))
    dcp.save({"x": torch.ones(2)}, storage_writer=writer)
    assert holdfast.open(tmp_path).step == 4


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": object()}}, r"a\.b is a builtins\.object"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "a cannot be saved: the safetensors format has no"),
        ({"a": torch.eye(2).to_sparse()}, "a cannot be saved: its layout is torch.sparse_coo"),
        ({"x@r1": torch.zeros(2)}, "reserved"),
        ({"@dcp": 1}, "reserved"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named_and_leaves_no_checkpoint(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointException, match=message):
        save(state, tmp_path, 1)
    with pytest.raises(holdfast.NotFound):
        holdfast.open(tmp_path)


@pytest.mark.parametrize(
    ("option", "make"),
    [
        ("enable_plan_caching", lambda: {"planner": DefaultSavePlanner(enable_plan_caching=True)}),
        ("use_collectives", lambda: {"use_collectives": False}),
    ],
)
def test_a_save_that_reuses_plans_or_has_no_collectives_is_refused(
    tmp_path: Path, option: str, make: Callable[[], dict[str, Any]]
) -> None:
    if not any(option in inspect.signature(call).parameters for call in (dcp.save, DefaultSavePlanner)):
        pytest.skip(f"torch {torch.__version__} does not have {option}")
    with pytest.raises((CheckpointException, holdfast.Unsupported), match=option):
        dcp.save({"x": torch.ones(2)}, storage_writer=HoldfastWriter(tmp_path, step=1), **make())


ROWS = [[(0, 2), (3, 6), (9, 10)], [(2, 3), (6, 9)]]
"""Regions of a tensor of 10 rows on two ranks, as in torch's own test of resharding."""


def rows_of_ten() -> dict[str, Any]:
    return {"w": torch.arange(40.0).reshape(10, 4), "b": torch.arange(10), "note": "kept"}


def test_a_rank_can_write_several_regions_of_a_tensor(tmp_path: Path) -> None:
    """All readers have the whole tensor: DCP, `holdfast.open`, a Checkpointer, an export."""
    saved = rows_of_ten()
    save_regions(tmp_path / "home", 3, saved, ROWS)
    empty = {"w": torch.zeros(10, 4), "b": torch.zeros(10, dtype=torch.int64), "note": ""}
    found = load(empty, tmp_path / "home")
    assert torch.equal(found["w"], saved["w"])
    assert torch.equal(found["b"], saved["b"])
    assert found["note"] == "kept"
    opened = holdfast.open(tmp_path / "home")
    assert opened.verify().is_good
    assert torch.equal(opened["w"], saved["w"])
    into = {"w": torch.zeros(10, 4)}
    opened.load_into(into)
    assert torch.equal(into["w"], saved["w"])
    holdfast.export_checkpoint(opened, tmp_path / "whole.safetensors")
    with safe_open(str(tmp_path / "whole.safetensors"), "pt") as file:
        assert torch.equal(file.get_tensor("w"), saved["w"])
    (path,) = tmp_path.rglob("rank-00000-*.safetensors")
    with safe_open(str(path), "pt") as file:
        keys = {key: tuple(file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
    assert keys == {"w": (2, 4), "w@r1": (3, 4), "w@r2": (1, 4), "b": (2,), "b@r1": (3,), "b@r2": (1,)}


def test_damage_in_one_of_several_regions_is_found(tmp_path: Path) -> None:
    save_regions(tmp_path, 3, rows_of_ten(), ROWS)
    opened = holdfast.open(tmp_path)
    (path,) = tmp_path.rglob("rank-00001-*.safetensors")
    flip(path)
    with pytest.raises(holdfast.Corrupt, match=r"which holds w, b: expected"):
        _ = opened["b"]


def test_regions_of_a_rank_that_overlap_are_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.InvalidInput, match=r"Rank 0 holds twice the region \[4:5, 0:4\] of w"):
        save_regions(tmp_path, 3, rows_of_ten(), [[(0, 5), (4, 10)]])
    assert not list(tmp_path.iterdir())


def plans_of(*states: dict[str, torch.Tensor]) -> list[SavePlan]:
    """Return the local plan of each rank that has one of these states."""
    plans = []
    for state in states:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=False)
        plans.append(planner.create_local_plan())
    return plans


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (
            ({"x": torch.ones(2)}, {"x": torch.ones(2)}),
            r"Ranks \d and \d both hold the region \[0:2\] of x\. Nothing was written",
        ),
        (
            ({"y": torch.ones(1), "x": torch.ones(2)}, {"x": torch.ones(3)}),
            r"Ranks have different tensors x: rank 0 has F32\[2\], rank 1 has F32\[3\]\. Nothing was written",
        ),
    ],
    ids=["overlap", "shape"],
)
def test_plans_that_do_not_fit_together_are_refused_before_anything_is_written(
    tmp_path: Path, states: tuple[dict[str, torch.Tensor], ...], message: str
) -> None:
    """Only a planner that keeps replicas in the plans makes such plans."""
    with pytest.raises(holdfast.InvalidInput, match=message):
        HoldfastWriter(tmp_path, step=1).prepare_global_plan(plans_of(*states))
    assert not list(tmp_path.iterdir())


def test_the_error_for_a_missing_step_lists_the_others(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="does not contain a complete checkpoint"):
        number(tmp_path)
    save({"x": torch.ones(2)}, tmp_path, 4)
    with pytest.raises(CheckpointException, match=r"not contain a complete step 9.*newest first: 4"):
        load({"x": torch.zeros(2)}, tmp_path, step=9)


# -- damage -------------------------------------------------------------------------------------------------


def data_file(home: Path, step: int) -> Path:
    (found,) = (home / f"step-{step:08d}").glob("*.safetensors")
    return found


def test_a_flipped_bit_is_detected_and_named(tmp_path: Path) -> None:
    save({"x": torch.ones(100)}, tmp_path, 1)
    path = data_file(tmp_path, 1)
    flip(path)
    with pytest.raises(CheckpointException, match=rf"{path.name} is damaged in chunk 0 .*which holds x: exp"):
        load({"x": torch.zeros(100)}, tmp_path)


def test_a_checkpoint_with_a_missing_file_is_skipped(tmp_path: Path) -> None:
    save({"x": torch.ones(2)}, tmp_path, 1)
    save({"x": torch.zeros(2)}, tmp_path, 2)
    data_file(tmp_path, 2).unlink()
    with pytest.warns(ResumeWarning, match="step 2 of attempt 1 is damaged"):
        assert number(tmp_path) == [1, 1]
    with pytest.raises(CheckpointException, match=r"step-00000002/rank-00000-a0001.safetensors is missing"):
        load({"x": torch.zeros(2)}, tmp_path, step=2)


@pytest.mark.parametrize("which", ["safetensors", "rank-00000-a0001.json", "manifest"])
def test_a_save_that_fails_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The disk fills up at the data file, at the part or at the manifest."""
    save({"x": torch.ones(2)}, tmp_path, 1)

    def fails(self: Any, name: str, data: Any, *, if_absent: bool = False) -> None:
        if which in name:
            raise holdfast.RetryLater(f"{name}: no space left")
        put(self, name, data, if_absent=if_absent)

    put = LocalStore.put
    monkeypatch.setattr(LocalStore, "put", fails)
    with pytest.raises(CheckpointException, match="no space left"):
        save({"x": torch.zeros(2)}, tmp_path, 2)
    monkeypatch.undo()
    assert holdfast.open(tmp_path).step == 1
    assert number(tmp_path) == [1, 1]
    save({"x": torch.full((2,), 2.0)}, tmp_path, 2)
    assert number(tmp_path) == [2, 2]
    first_left_files = which != "safetensors"
    assert holdfast.open(tmp_path).attempt == 1 + first_left_files, "files of the first try are not mixed in"


def test_a_save_killed_at_any_point_leaves_all_or_nothing(tmp_path: Path) -> None:
    """Each failpoint has its own home; the next start saves the same step."""
    seen, point = set(), 0
    while True:
        point += 1
        home = tmp_path / str(point)
        save({"x": torch.ones(2)}, home, 1)
        status = save_elsewhere(home, 2, f"store.linked:{point}")
        if status == 0:
            break
        assert status == -9
        newest = holdfast.open(home)
        assert newest.verify().is_good
        seen.add(newest.step)
        assert number(home) == [newest.step, newest.step]
        assert save_elsewhere(home, 3) == 0
        assert number(home) == [3, 3]
    assert seen == {1, 2}, "killed before the commit and right after it"
    assert point > 4


@pytest.mark.parametrize("text", ["", "[]", '{"values": {"a": 1}, "paths": {}}', '{"values": {"a": 0}}'])
def test_a_checkpoint_whose_index_cannot_be_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    save({"x": torch.ones(2), "a": 5}, tmp_path, 1)
    monkeypatch.setattr(ValueIndex, "text", lambda self: text)
    save({"x": torch.zeros(2), "a": 6}, tmp_path, 2)
    with pytest.raises(holdfast.Corrupt, match=r"rank-00000-a0001\.json has an index of values that cannot"):
        HoldfastReader(tmp_path, step=2).read_metadata()
    with pytest.warns(ResumeWarning, match="step 2 of attempt 1 is damaged"):
        assert number(tmp_path) == [1, 1]


def test_only_needed_chunks_are_read(tmp_path: Path) -> None:
    state = {"big": torch.zeros(1 << 20), "x": torch.ones(2)}
    save(state, tmp_path, 1)
    path = data_file(tmp_path, 1)
    flip(path, middle(path))  # of what is not asked for
    assert number(tmp_path) == [1, 1]
