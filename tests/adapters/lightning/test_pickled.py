"""A checkpoint dictionary of any content comes back from the home and from its file as torch.save has it."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from adapters.damage import flip
from holdfast.adapters.lightning.ckpt_file import Facts, HomePlace, pickle_content, read_id, verify_ckpt
from holdfast.adapters.lightning.plugin import BackgroundSaver

FACTS = Facts("a.ckpt", 5, 0, is_full=True)


@pytest.fixture
def saver(tmp_path: Path) -> Any:
    """Return a saver whose home is in the test's folder."""
    one = BackgroundSaver(HomePlace(str(tmp_path / "home")), "1GiB")
    yield one
    one.close()


def content() -> dict[str, Any]:
    """Return a dictionary with all that is difficult: ties, views, dtypes, keys, and objects."""
    base = torch.arange(12, dtype=torch.float32)
    state = collections.OrderedDict(
        a=base.view(3, 4), tied=base.view(3, 4), part=base[3:7], t=base.view(3, 4).T
    )
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    return {
        "state_dict": state,
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2, dtype=torch.bfloat16)}}}],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "complex": torch.ones(2, dtype=torch.complex128),
        "hyper_parameters": argparse.Namespace(lr=0.1, layers=(1, 2), module=torch.nn.Linear(2, 1)),
        "name with.dots/and@r1": {"x": torch.ones(1)},
    }


def save(saver: BackgroundSaver, path: Path, given: dict[str, Any]) -> None:
    saver.save(pickle_content(given), str(path), FACTS)


def test_a_file_has_the_content_that_torch_save_writes(saver: BackgroundSaver, tmp_path: Path) -> None:
    given = content()
    save(saver, tmp_path / "ours.ckpt", given)
    saver.wait()
    torch.save(given, tmp_path / "stock.ckpt")
    ours, stock = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("ours", "stock"))
    assert repr(ours) == repr(stock)
    assert type(ours["state_dict"]) is collections.OrderedDict
    assert ours["state_dict"]._metadata == {"": {"version": 2}}
    assert (
        ours["state_dict"]["part"].untyped_storage()._cdata
        == ours["state_dict"]["a"].untyped_storage()._cdata
    )
    assert ours["state_dict"]["t"].stride() == given["state_dict"]["t"].stride()


def test_tensors_are_copied_before_save_returns(saver: BackgroundSaver, tmp_path: Path) -> None:
    weight = torch.ones(1000)
    save(saver, tmp_path / "a.ckpt", {"state_dict": {"weight": weight}})
    weight.zero_()
    saver.wait()
    assert torch.load(tmp_path / "a.ckpt")["state_dict"]["weight"].eq(1).all()


def test_tensors_have_their_paths_as_names_in_the_home(saver: BackgroundSaver, tmp_path: Path) -> None:
    save(saver, tmp_path / "a.ckpt", content())
    saver.wait()
    names = holdfast.open(tmp_path / "home").keys()
    assert {"checkpoint.state_dict.a", "checkpoint.optimizer_states.0.state.0.exp_avg"} <= set(names)


def test_a_file_fits_weights_only_loading_if_its_objects_do(saver: BackgroundSaver, tmp_path: Path) -> None:
    save(saver, tmp_path / "a.ckpt", {"state_dict": {"w": torch.ones(2)}, "epoch": 3})
    saver.wait()
    assert torch.load(tmp_path / "a.ckpt", weights_only=True, mmap=True)["epoch"] == 3


@pytest.mark.parametrize("part", ["data/0", "data.pkl", ".holdfast/hashes.json"])
def test_a_changed_byte_is_found(saver: BackgroundSaver, tmp_path: Path, part: str) -> None:
    import zipfile

    path = tmp_path / "a.ckpt"
    save(saver, path, {"state_dict": {"w": torch.arange(9000.0)}})
    saver.wait()
    assert verify_ckpt(path) is not None
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"archive/{part}")
        at = archive.read(info)[:8]
    flip(path, path.read_bytes().find(at, info.header_offset + 30) + 4)
    with pytest.raises(holdfast.Corrupt, match=r"damaged"):
        verify_ckpt(path)


def test_equal_tensors_of_one_moment_are_saved_once(saver: BackgroundSaver, tmp_path: Path) -> None:
    weight = torch.ones(100_000)
    with saver.moment():
        save(saver, tmp_path / "a.ckpt", {"w": weight, "best": 1})
        save(saver, tmp_path / "last.ckpt", {"w": weight, "best": 2})
        weight.add_(1)
        save(saver, tmp_path / "b.ckpt", {"w": weight, "best": 3})
    saver.wait()
    loaded = [torch.load(tmp_path / f"{name}.ckpt") for name in ("a", "last", "b")]
    assert [(one["best"], int(one["w"][0])) for one in loaded] == [(1, 1), (2, 1), (3, 2)]
    ids = [read_id(tmp_path / f"{name}.ckpt") for name in ("a", "last", "b")]
    assert [one.step for one in ids if one is not None] == [5, 5, 6]


def test_the_home_keeps_the_newest_checkpoint_only(saver: BackgroundSaver, tmp_path: Path) -> None:
    for name in "abc":
        save(saver, tmp_path / f"{name}.ckpt", {"w": torch.ones(10)})
        saver.wait()
    saver.close()
    assert holdfast.open(tmp_path / "home").step == 7
    with pytest.raises(holdfast.NotFound):
        holdfast.open(tmp_path / "home", step=5)


def test_a_file_that_is_not_from_here_is_left_to_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "stock.ckpt")
    assert verify_ckpt(tmp_path / "stock.ckpt") is None
