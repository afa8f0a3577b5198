"""Loading by readers: into modules, objects and state dicts, verified, and beside a training that saves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import holdfast
from holdfast.errors import InvalidInput, NotFound
from stage.training import make_checkpointer, make_model, train

WAIT_S = 600.0


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A home with step 7, and the state that is in it."""
    model = make_model()
    state = {"model": model, "optimizer": AdamW(model.parameters(), lr=0.1), "epoch": 3}
    train(state["model"], state["optimizer"])
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.save(7)
    return tmp_path / "home", state


def zeroed(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    return other


def are_equal(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_a_state_dict_is_that_of_the_module(saved: tuple[Path, dict[str, Any]]) -> None:
    home, state = saved
    found = holdfast.open(home).state_dict("model")
    assert list(found) == list(state["model"].state_dict())
    other = zeroed(state["model"])
    other.load_state_dict(found)
    assert are_equal(other, state["model"])
    with pytest.raises(NotFound, match="'net'; it has model, optimizer"):
        holdfast.open(home).state_dict("net")


def test_a_module_is_filled_in_place_and_one_on_the_meta_device_made_real(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    home, state = saved
    other = zeroed(state["model"])
    before = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    drawn = torch.get_rng_state()
    loaded = holdfast.open(home).load_into(other)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert are_equal(other, state["model"])
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == before
    assert torch.equal(torch.get_rng_state(), drawn)
    with torch.device("meta"):
        other = make_model()
    holdfast.open(home).load_into(other)
    assert are_equal(other, state["model"])


def test_objects_are_filled_and_values_written_back(saved: tuple[Path, dict[str, Any]]) -> None:
    home, state = saved
    other = zeroed(state["model"])
    optimizer = AdamW(other.parameters(), lr=9.0)
    objects = {"model": other, "optimizer": optimizer, "epoch": 0}
    holdfast.open(home).load_into(objects)
    assert objects["epoch"] == 3
    assert are_equal(other, state["model"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    (first, *_), (theirs, *_) = optimizer.state.values(), state["optimizer"].state.values()
    assert torch.equal(first["exp_avg"], theirs["exp_avg"])


@pytest.mark.parametrize("key", [None, "model"])
def test_tensors_by_name_are_filled(saved: tuple[Path, dict[str, Any]], key: str | None) -> None:
    home, state = saved
    prefix = "" if key else "model."
    expected = {prefix + name: tensor for name, tensor in state["model"].state_dict().items()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    holdfast.open(home).load_into(tensors, key)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_what_does_not_fit_changes_nothing_unless_it_is_allowed(saved: tuple[Path, dict[str, Any]]) -> None:
    home, state = saved
    opened = holdfast.open(home)
    other = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 3))
    before = copy.deepcopy(other)
    with pytest.raises(InvalidInput, match=r"model\.1\.weight"):
        opened.load_into(other)
    with pytest.raises(InvalidInput, match=r"in the live state but not in the checkpoint: net\.0"):
        opened.load_into(zeroed(state["model"]), "net")
    with pytest.raises(InvalidInput, match=r"model\.more"):
        opened.load_into({"more": torch.zeros(3)}, "model")
    with pytest.raises(InvalidInput, match="fills a module, or a mapping"):
        opened.load_into([other])  # pyright: ignore[reportArgumentType]
    assert are_equal(other, before)
    small = nn.Sequential(nn.Linear(128, 128))
    loaded = opened.load_into(small, strict=False)
    assert loaded.missing == ()
    assert "model.2.weight" in loaded.unexpected
    assert torch.equal(small[0].weight, state["model"][0].weight)  # pyright: ignore[reportArgumentType]
    renamed = {"net": zeroed(state["model"])}
    opened.load_into(renamed, rename={"model": "net"})
    assert are_equal(renamed["net"], state["model"])


def test_the_writer_is_not_disturbed(tmp_path: Path) -> None:
    """Nothing in the home changes by reading, and the training saves on."""
    home, state = tmp_path / "home", {"model": make_model()}
    with make_checkpointer(home, state, keep=None) as writer:
        for step in range(1, 4):
            writer.save(step).wait_durable(WAIT_S)
            before = {path: path.read_bytes() for path in home.glob("[!h]*/*")}  # its history may go on
            other = zeroed(state["model"])
            holdfast.open(home).load_into(other)
            assert are_equal(other, state["model"])
            assert {path: path.read_bytes() for path in home.glob("[!h]*/*")} == before
            with torch.no_grad():
                next(state["model"].parameters()).add_(1)
