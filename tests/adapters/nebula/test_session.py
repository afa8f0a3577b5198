"""A session in one process: tags, versions, going back, damage, memory."""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
import holdfast.adapters.nebula as nm
from adapters.damage import flip
from holdfast.adapters.nebula import interface
from holdfast.adapters.nebula.tag_index import TaggedCheckpoint, TagIndex
from holdfast.errors import Corrupt, InvalidInput, NotFound, SaveWarning, Unsupported


def save(tag: str, value: Any, name: str = "model", num_of_files: int | None = None) -> None:
    nm.Checkpoint(tag, num_of_files).save(name, value)


def load(tag: str, name: str = "model", **how: Any) -> Any:
    found = nm.get_checkpoint(tag)
    assert found is not None
    return found.load(name, **how)


def fill(*steps: int) -> None:
    """Save some steps with their numbers as values, each until it is complete in a near tier."""
    for step in steps:
        save(f"global_step{step}", {"n": step, "t": torch.full((100,), float(step))})
        nm.get_latest_checkpoint()


def damage(home: str | Path, step: int) -> None:
    """Flip a bit in the data of a step."""
    (path,) = Path(home).rglob(f"step-{step:08d}/*.safetensors")
    flip(path)


# -- beginning -----------------------------------------------------------------------------------------------


def test_a_save_without_a_home_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEBULA_PERSISTENT_STORAGE_PATH", raising=False)
    with pytest.raises(InvalidInput, match="NEBULA_PERSISTENT_STORAGE_PATH"):
        nm.Checkpoint("global_step1")


def test_the_environment_alone_configures_a_session(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", home)
    save("global_step3", {"a": 1})
    nm.flush_persistence()
    assert holdfast.open(home).step == 3


def test_a_comma_after_the_path_is_accepted_with_a_warning(home: str) -> None:
    with pytest.warns(SaveWarning, match="comma"):
        nm.init((home,))
    save("global_step1", {"a": 1})
    assert load("global_step1") == {"a": 1}


def test_init_with_the_same_home_keeps_the_session_and_another_home_ends_it(begun: str) -> None:
    half = nm.Checkpoint("global_step1", 2)
    half.save("a", 1)
    nm.init(begun)
    nm.Checkpoint("global_step1", 2).save("b", 2)
    nm.init(begun + "-other")
    assert holdfast.open(begun).step == 1
    assert nm.get_latest_checkpoint().tag == ""


def test_a_search_of_an_empty_home_finds_nothing_and_loading_raises(begun: str) -> None:
    latest = nm.get_latest_checkpoint()
    assert latest.tag == ""
    assert nm.get_checkpoint("global_step1") is None
    assert nm.get_latest_checkpoint_path("checkpoint", begun) == ""
    assert nm.list_checkpoints() == {}
    with pytest.raises(NotFound, match="no checkpoint to load"):
        latest.load("model")
    with pytest.raises(NotFound, match="global_step1"):
        nm.Checkpoint("global_step1").load("model")


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    "bad", [("",), (None,), (5,), *(("global_step1", one) for one in (0, -1, 1.0, True, "2"))]
)
def test_a_tag_must_be_a_string_and_a_number_of_files_a_number(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="tag must be a string" if len(bad) == 1 else "num_of_files"):
        nm.Checkpoint(*bad)


# -- completing ----------------------------------------------------------------------------------------------


def test_a_checkpoint_exists_when_all_its_files_are_saved(begun: str) -> None:
    checkpoint = nm.Checkpoint("global_step10", 2)
    checkpoint.save("a", {"n": 1})
    assert nm.get_latest_checkpoint().tag == ""
    checkpoint.save("b", {"n": 2})
    latest = nm.get_latest_checkpoint()
    assert (latest.tag, latest.load("a"), latest.load("b")) == ("global_step10", {"n": 1}, {"n": 2})
    with pytest.raises(NotFound, match=r"'c'. It has \['a', 'b'\]"):
        latest.load("c")


@pytest.mark.parametrize("count", [-2, 3])
def test_commit_completes_a_tag(begun: str, count: int) -> None:
    checkpoint = nm.Checkpoint("global_step10", count)
    checkpoint.save("a", 1)
    checkpoint.save("b", 2)
    assert nm.get_checkpoint("global_step10") is None
    assert checkpoint.commit() is True
    assert checkpoint.commit() is True
    assert load("global_step10", "b") == 2


def test_a_commit_of_nothing_warns(begun: str) -> None:
    with pytest.warns(SaveWarning, match="nothing to complete"):
        assert nm.Checkpoint("global_step10", -2).commit() is False


def test_saved_objects_may_be_changed_at_once(begun: str) -> None:
    checkpoint = nm.Checkpoint("global_step1", 2)
    values = [torch.arange(1000.0), torch.arange(1000.0)]
    for name, value in zip("ab", values, strict=True):
        checkpoint.save(name, value)
        value.zero_()
    assert torch.equal(load("global_step1", "a"), torch.arange(1000.0))
    assert torch.equal(load("global_step1", "b"), torch.arange(1000.0))


def test_the_file_that_completes_a_tag_is_not_copied_twice(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two files only the first is copied before the save."""
    from holdfast.checkpoint.exchange.packed_value import Packed

    copied, copy = [], Packed.copied
    monkeypatch.setattr(Packed, "copied", lambda self: copied.append(self.tree) or copy(self))
    nm.init(home)
    checkpoint = nm.Checkpoint("global_step1", 2)
    checkpoint.save("a", {"x": torch.ones(3)})
    assert len(copied) == 1
    checkpoint.save("b", {"x": torch.ones(3)})
    save("global_step2", {"x": torch.ones(3)})
    assert len(copied) == 1


def test_a_late_file_makes_a_version_with_both(begun: str) -> None:
    checkpoint = nm.Checkpoint("global_step10")
    checkpoint.save("a", {"t": torch.ones(2)})
    checkpoint.save("b", {"n": 2})
    latest = nm.get_latest_checkpoint()
    assert latest.tag == "global_step10"
    assert torch.equal(latest.load("a")["t"], torch.ones(2))
    assert latest.load("b") == {"n": 2}


@pytest.mark.parametrize("is_base", [False, True])
def test_a_complete_step_is_not_saved_again_and_warns(begun: str, is_base: bool) -> None:
    """Also that which a new start continues."""
    fill(10)
    if is_base:
        interface.end()
        nm.init(begun)
        nm.get_latest_checkpoint().load("model")
    with pytest.warns(SaveWarning, match="not saved again"):
        save("global_step10", {"n": 2})
    assert load("global_step10")["n"] == 10
    fill(11)
    assert load("global_step11")["n"] == 11


def test_a_tag_without_a_step_can_be_saved_again_and_the_newest_is_found(begun: str) -> None:
    for number in range(3):
        save("best", {"n": number})
    assert load("best") == {"n": 2}


def test_a_tag_that_was_never_complete_warns_at_the_end(begun: str) -> None:
    nm.Checkpoint("global_step1", 2).save("a", 1)
    with pytest.warns(SaveWarning, match=r"global_step1 was never complete.*'a'"):
        interface.end()


# -- steps ---------------------------------------------------------------------------------------------------


def test_tags_become_steps(begun: str) -> None:
    for tag in ("global_step10", "best", "global_step11", "global_step20", "epoch 3/last"):
        save(tag, {"tag": tag})
    listed = nm.list_checkpoints()
    steps = {"epoch 3/last": 21, "global_step20": 20, "global_step11": 12, "best": 11, "global_step10": 10}
    assert {tag: one["step"] for tag, one in listed.items()} == steps
    assert [load(tag)["tag"] for tag in steps] == list(steps)


def test_checkpoints_are_listed(home: str) -> None:
    nm.init(home, 3600)
    save("global_step1", {"t": torch.ones(1000)})
    one = json.loads(json.dumps(nm.list_checkpoints()))["global_step1"]
    assert one["tiers"] == ["local"]
    assert (one["step"], one["attempt"], one["files"]) == (1, 1, ["model"])
    assert one["bytes"] > 4000
    assert nm.get_latest_checkpoint(home).tag == "", "it is not complete there"
    assert nm.get_latest_checkpoint().tag == "global_step1"
    nm.flush_persistence("global_step1")
    assert nm.list_checkpoints()["global_step1"]["tiers"] == ["local", "home"]
    assert nm.list_checkpoints(home)["global_step1"]["files"] == ["model"]
    assert nm.get_latest_checkpoint(home).tag == "global_step1"


def test_flush_copies_near_checkpoints_to_home(home: str) -> None:
    nm.init(home, 3600, 3)
    fill(1, 2, 3)
    nm.flush_persistence()
    assert [one["tiers"] for one in nm.list_checkpoints().values()] == [["local", "home"]] * 3


def test_a_flush_passes_over_what_the_near_tiers_have_deleted(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep the newest only, and may delete an older checkpoint before it is sent."""
    nm.init(home, 3600, 2, local=tmp_path / "near")
    fill(1, 2, 3)
    listed = TagIndex.checkpoints

    def checkpoints(index: TagIndex, likely_step: int | None = None) -> Iterator[TaggedCheckpoint]:
        found = list(listed(index, likely_step))
        shutil.rmtree(next((tmp_path / "near").rglob("step-00000002")))
        return iter(found)

    with monkeypatch.context() as patch:
        patch.setattr(TagIndex, "checkpoints", checkpoints)
        nm.flush_persistence()
    assert "global_step3" in nm.list_checkpoints(home)
    assert "global_step2" not in nm.list_checkpoints(home)


def test_a_flush_sends_what_an_earlier_start_left_in_the_local_tier(home: str, tmp_path: Path) -> None:
    for steps in ((1, 2), (3,)):
        nm.init(home, 3600, 5, local=tmp_path / "near")
        fill(*steps)
        if steps == (1, 2):
            interface.end()  # only the newest is in home now
    nm.flush_persistence()
    assert [one["tiers"] for one in nm.list_checkpoints().values()] == [["local", "home"]] * 3


def test_a_flush_of_a_damaged_checkpoint_raises(home: str, tmp_path: Path) -> None:
    nm.init(home, 3600, 5, local=tmp_path / "near")
    fill(1, 2, 3)
    damage(tmp_path / "near", 1)
    with pytest.raises(Corrupt, match="Step 1 is not in home"):
        nm.flush_persistence("global_step1")


def test_near_tiers_keep_the_given_number_of_checkpoints(home: str, tmp_path: Path) -> None:
    nm.init(home, 3600, 2, local=tmp_path / "near")
    fill(*range(1, 6))
    give_up_s = time.monotonic() + 60  # what is not kept is deleted beside everything else
    while len(nm.list_checkpoints()) > 2 and time.monotonic() < give_up_s:
        time.sleep(0.02)
    assert list(nm.list_checkpoints()) == ["global_step5", "global_step4"]


def test_after_going_back_a_tag_is_saved_again(begun: str) -> None:
    fill(10, 20, 30)
    assert load("global_step10")["n"] == 10
    save("global_step20", {"n": 21})
    latest = nm.get_latest_checkpoint()
    assert (latest.tag, latest.load("model")) == ("global_step20", {"n": 21})
    assert holdfast.open(begun).manifest.ancestors == ((1, 10),)
    save("global_step30", {"n": 31})
    assert nm.get_latest_checkpoint().load("model") == {"n": 31}


def test_loading_an_old_checkpoint_alone_is_not_going_back(begun: str) -> None:
    fill(10, 20)
    assert load("global_step10")["n"] == 10
    fill(30)
    assert list(nm.list_checkpoints()) == ["global_step30", "global_step20", "global_step10"]
    assert holdfast.open(begun).attempt == 1


@pytest.mark.parametrize("looks", [True, False])
def test_a_new_start_continues_the_loaded_checkpoint_or_the_newest(begun: str, looks: bool) -> None:
    fill(10, 20)
    interface.end()
    nm.init(begun)
    if looks:
        load("global_step10")
    fill(25)
    nm.flush_persistence()
    assert holdfast.open(begun).manifest.ancestors == ((1, 10 if looks else 20),)


# -- damage --------------------------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(begun: str) -> None:
    fill(1, 2)
    interface.end()
    damage(begun, 2)
    nm.init(begun)
    with pytest.warns(SaveWarning, match=r"global_step1 is used.*step 2 of attempt 1"):
        latest = nm.get_latest_checkpoint()
    assert latest.tag == "global_step1"
    assert latest.load("model")["t"][0] == 1
    with pytest.raises(Corrupt):
        load("global_step2")
    interface.end()
    damage(begun, 1)
    nm.init(begun)
    with pytest.raises(Corrupt, match="all of them are damaged"):
        nm.get_latest_checkpoint()


def test_a_damaged_near_copy_is_read_from_home(home: str, tmp_path: Path) -> None:
    near = tmp_path / "near"
    nm.init(home, 3600, local=near)
    fill(1)
    interface.end()
    damage(near, 1)
    nm.init(home, 3600, local=near)
    assert nm.get_latest_checkpoint().load("model")["t"].sum() == 100


# -- memory --------------------------------------------------------------------------------------------------


def test_a_save_over_the_limit_is_refused_with_its_size(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "200000")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    nm.init(home)
    save("global_step1", {"t": torch.ones(100)})
    with pytest.raises(InvalidInput, match=r"an arena of 4\d\d kB, but memory= allows 25\.0 kB in all"):
        save("global_step2", {"t": torch.ones(100_000)})
    interface.end()
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "4MB")
    nm.init(home)
    save("global_step2", {"t": torch.ones(100_000)})
    assert load("global_step2")["t"].sum() == 100_000


# -- values --------------------------------------------------------------------------------------------------


def test_modules_and_optimizers_are_loaded_as_their_state_dicts(begun: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    save("global_step1", {"model": model, "inner": [optimizer]}, "all")
    found = load("global_step1", "all")
    again = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    again.load_state_dict(found["model"])
    again.load_state_dict(found["model"].state_dict())
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))
    torch.optim.AdamW(again.parameters()).load_state_dict(found["inner"][0])
    with pytest.raises(Unsupported, match="holds no code"):
        found["model"](torch.ones(1, 3))
    with pytest.raises(AttributeError, match="'forward'"):
        _ = found["model"].forward


def test_values_of_many_kinds_round_trip(begun: str) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    value = {
        "args": argparse.Namespace(lr=0.1, sizes=[1, 2], inner=argparse.Namespace(t=torch.ones(2))),
        "facts": types.SimpleNamespace(a=1),
        3: (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), np.float32(0.5), np.arange(3)),
        "tied": [shared, shared],
        "order": collections.OrderedDict(b=1, a=2),
        "none": None,
        "empty": torch.empty(0, 4),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
    }
    save("global_step1", value, "a/b@c%")
    found = load("global_step1", "a/b@c%")
    assert found["args"].lr == 0.1
    assert torch.equal(found["args"].inner.t, torch.ones(2))
    assert found["facts"] == types.SimpleNamespace(a=1)
    assert found[3][:4] == (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), np.float32(0.5))
    assert np.array_equal(found[3][4], np.arange(3))
    assert found["tied"][0] is found["tied"][1]
    assert torch.equal(found["tied"][0], shared)
    assert found["order"] == value["order"]
    assert list(found) == list(value)
    assert found["empty"].shape == (0, 4)
    assert found["bf16"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["rng", "nebula", "mp_rank_00_model_states.pt", "<CKPT_NAME>", "模型"])
def test_partitions_may_have_any_name(begun: str, name: str) -> None:
    save("global_step1", {"t": torch.ones(2)}, name)
    assert torch.equal(load("global_step1", name)["t"], torch.ones(2))


def test_a_value_that_cannot_be_saved_is_refused_by_its_path(begun: str) -> None:
    checkpoint = nm.Checkpoint("global_step1", 2)
    checkpoint.save("a", 1)
    with pytest.raises(InvalidInput, match=r"b\.inner\.hook"):
        checkpoint.save("b", {"inner": {"hook": lambda: None}})
    with pytest.raises(Unsupported, match=r"b\.s"):
        checkpoint.save("b", {"s": torch.ones(2, 2).to_sparse()})
    checkpoint.save("b", 2)
    assert load("global_step1", "b") == 2


def test_tensors_are_loaded_to_map_location(begun: str) -> None:
    save("global_step1", {"t": torch.ones(4)})
    asked = []

    def ask(storage: Any, location: str) -> Any:
        asked.append(location)
        return storage

    for where in (None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, {}, ask, lambda storage, _: None):
        assert torch.equal(load("global_step1", map_location=where)["t"], torch.ones(4))
    assert asked == ["cpu"]
    assert load("global_step1", map_location="meta")["t"].device.type == "meta"


def test_the_path_of_the_latest_checkpoint_is_a_torch_file_that_is_written_once(begun: str) -> None:
    save("global_step1", {"t": torch.ones(4), "args": argparse.Namespace(lr=0.1)}, "checkpoint")
    path = nm.get_latest_checkpoint_path("checkpoint", begun)
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["t"], torch.ones(4))
    assert found["args"] == {"lr": 0.1}
    before = Path(path).stat().st_mtime_ns
    assert nm.get_latest_checkpoint_path("checkpoint", begun) == path
    assert Path(path).stat().st_mtime_ns == before
    with pytest.raises(NotFound, match="no partition 'model'"):
        nm.get_latest_checkpoint_path("model")
    save("global_step2", {"t": torch.zeros(4)}, "checkpoint")
    assert nm.get_latest_checkpoint_path("checkpoint") != path


def test_a_normal_run_does_not_warn(home: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm.init(home)
        save("global_step1", {"t": torch.ones(4)})
        nm.get_latest_checkpoint().load("model")
        interface.end()
