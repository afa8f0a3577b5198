"""`torch.distributed.checkpoint` over Holdfast on several ranks: layouts, async saves, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from adapters import sharded
from holdfast.format.layout import parse_header
from stage.ranks import run_ranks

pytestmark = pytest.mark.ranks


def check(found: list[Any], expected: list[Any]) -> None:
    """Every rank has what the first one that saved had, and nothing is missing."""
    assert isinstance(expected[0], dict), expected[0]
    assert len(expected[0]) > 20
    for one in found:
        assert isinstance(one, dict), one
        assert one == expected[0]


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ((2, "fsdp"), (1, "fsdp")),
        ((2, "fsdp"), (4, "fsdp")),
        ((4, "fsdp"), (2, "ddp")),
        ((4, "hsdp"), (2, "fsdp")),
        ((2, "ddp"), (3, "fsdp")),
        ((4, "tp+fsdp"), (2, "tp")),
        ((2, "tp"), (4, "tp+fsdp")),
    ],
    ids=str,
)
def test_any_layout_loads_what_another_saved(
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


def test_each_byte_is_written_once(tmp_path: Path) -> None:
    """Replicas of replicated and of sharded tensors are written by one rank."""
    assert isinstance(run_ranks(4, sharded.save, tmp_path, "hsdp")[0], dict)
    opened = holdfast.open(tmp_path)
    written = 0
    for path in tmp_path.glob("step-*/*.safetensors"):
        _, start = parse_header(path.read_bytes(), path.name)
        written += path.stat().st_size - start
    assert written == sum(opened.info(name).num_bytes for name in opened) > 1000


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_an_async_save_holds_what_was_there_when_it_began(tmp_path: Path, kind: str) -> None:
    """Thread or process, it is one attempt with the plain save after it."""
    kept = run_ranks(2, sharded.save_async, tmp_path, kind)
    assert isinstance(kept[0], dict), kept[0]
    opened = holdfast.open(tmp_path, step=6)
    assert opened.verify().is_good
    for name in opened:
        assert opened[name].tolist() == kept[0][f".{name}"][1], name
    assert [found.name for found in (tmp_path / "attempts").iterdir()] == ["a0001.json"]
    assert holdfast.open(tmp_path).step == 7


def test_a_value_that_cannot_be_saved_is_named_on_every_rank(tmp_path: Path) -> None:
    said = run_ranks(2, sharded.save_what_cannot_be_saved, tmp_path)
    for one in said:
        assert "odd.thing is a builtins.object" in one
    with pytest.raises(holdfast.NotFound):
        holdfast.open(tmp_path)


def test_ranks_that_choose_different_checkpoints_load_none(tmp_path: Path) -> None:
    for step in (1, 2):
        assert isinstance(run_ranks(2, sharded.save, tmp_path, "ddp", step)[0], dict)
    for one in run_ranks(2, sharded.choose_apart, tmp_path):
        assert "The ranks have chosen different checkpoints" in one
        assert "(steps [1, 2])" in one


def test_a_save_in_which_a_rank_is_killed_leaves_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    home = tmp_path / "home"
    ranks = [
        sharded.CONTEXT.Process(target=sharded.fall_while_saving, args=(rank, str(tmp_path / "meet"), home))
        for rank in range(2)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    assert [one.exitcode for one in ranks] == [3, -9]
    assert list(home.glob("step-00000009/*.safetensors"))
    with pytest.raises(holdfast.NotFound):
        holdfast.open(home)
