"""`holdfast diff` finds every difference, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from cli.conftest import Command, flip
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.dtypes import TORCH_NAMES
from holdfast.checkpoint.store import open_store
from making import make_checkpoint, make_home


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Make two homes without checkpoints."""
    homes = tmp_path / "a", tmp_path / "b"
    for place in homes:
        make_home(open_store(place))
    return homes


def put(home: Path, **tensors: torch.Tensor) -> None:
    make_checkpoint(open_store(home), 1, tensors=[tensors])


def changes(holdfast: Command, pair: tuple[Path, Path], *words: object) -> dict[str, dict]:
    result = holdfast("diff", *pair, "--json", *words)
    found = {change["name"]: change for change in result.json["changed"]}
    assert result.status == int(bool(found))
    return found


def test_a_checkpoint_equals_its_copy(holdfast: Command, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "copy")
    result = holdfast("diff", home, tmp_path / "copy")
    assert result.status == 0
    assert result.out.endswith("3 tensors compared, no difference\n")


def test_steps_of_one_home_are_compared(holdfast: Command, home: Path) -> None:
    result = holdfast("diff", f"{home}@100", f"{home}@200", "--json")
    assert result.status == 1
    found = result.json
    assert (found["a"]["step"], found["b"]["step"]) == (100, 200)
    weight, bias = found["changed"]
    numbers = {"num_changed": 120, "num_items": 120, "max_abs": 100.0, "mean_abs": 100.0}
    assert weight == {"name": "model.weight", "how": "float32[30, 4]", **numbers}
    assert (bias["num_changed"], bias["max_abs"], bias["mean_abs"]) == (4, 400.0, 200.0)
    assert found["values"] == [{"name": name, "a": "1", "b": "2"} for name in ("epoch", "epoch@r1")]
    assert "only in" not in holdfast("diff", f"{home}@100", f"{home}@200").out


def test_per_rank_state_of_each_rank_is_compared_unless_their_numbers_differ(
    holdfast: Command, pair: tuple[Path, Path]
) -> None:
    own = [{"rng": torch.zeros(3)}, {"rng": torch.zeros(3)}]
    other = [{"rng": torch.zeros(3)}, {"rng": torch.tensor([0.0, 0.0, 1.0])}]
    for step, b in ((1, other), (2, other[:1])):
        for place, tensors in zip(pair, (own, b), strict=True):
            make_checkpoint(open_store(place), step, tensors=tensors, per_rank=["rng"])
        if step == 1:
            assert list(changes(holdfast, pair)) == ["rng@r1"]
    holdfast("diff", *pair).printed("numbers of ranks differ")


def test_names_on_one_side_only(holdfast: Command, pair: tuple[Path, Path]) -> None:
    put(pair[0], both=torch.ones(2), left=torch.ones(2))
    put(pair[1], both=torch.ones(2), right=torch.ones(2))
    holdfast("diff", *pair).printed("only in A: left\nonly in B: right\n", status=1)
    assert holdfast("diff", *pair, "--filter", "bo*").status == 0


def test_another_shape_or_dtype_is_a_difference(holdfast: Command, pair: tuple[Path, Path]) -> None:
    put(pair[0], x=torch.zeros(4), y=torch.zeros(2))
    put(pair[1], x=torch.zeros(2, 2), y=torch.zeros(2, dtype=torch.float64))
    found = changes(holdfast, pair)
    assert found["x"]["how"] == "float32[4] in A, float32[2, 2] in B"
    assert found["y"]["how"] == "float32[2] in A, float64[2] in B"


@pytest.mark.parametrize("name", sorted(name for name in TORCH_NAMES if hasattr(torch, TORCH_NAMES[name])))
def test_one_element_of_any_dtype(holdfast: Command, pair: tuple[Path, Path], name: str) -> None:
    dtype = getattr(torch, TORCH_NAMES[name])
    zeros = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    other = zeros.clone()
    other.view(torch.uint8)[dtype.itemsize] = 1
    for place, tensor in zip(pair, (zeros, other), strict=True):
        put(place, x=tensor, empty=zeros[:0], scalar=zeros[0])
    found = changes(holdfast, pair)
    assert list(found) == ["x"]
    assert (found["x"]["num_changed"], found["x"]["num_items"]) == (1, 4)


def test_bits_are_compared_without_a_tolerance(holdfast: Command, pair: tuple[Path, Path]) -> None:
    put(pair[0], zero=torch.tensor([0.0, 1.0]), near=torch.tensor([1.0]))
    put(pair[1], zero=torch.tensor([-0.0, 1.0]), near=torch.tensor([1.25]))
    found = changes(holdfast, pair)
    assert (found["zero"]["num_changed"], found["zero"]["max_abs"]) == (1, 0.0)
    assert list(changes(holdfast, pair, "--within", 0.2)) == ["near"]
    assert list(changes(holdfast, pair, "--within", 0.25)) == []


def test_nan_and_infinity(holdfast: Command, pair: tuple[Path, Path]) -> None:
    nan, inf = float("nan"), float("inf")
    put(pair[0], same=torch.tensor([nan, inf, -inf]), nan=torch.tensor([nan, 1.0]), inf=torch.tensor([inf]))
    put(pair[1], same=torch.tensor([nan, inf, -inf]), nan=torch.tensor([2.0, 1.0]), inf=torch.tensor([-inf]))
    found = changes(holdfast, pair, "--within", 1e30)
    numbers = {name: (change["num_changed"], change["max_abs"]) for name, change in found.items()}
    assert numbers == {"nan": (1, "nan"), "inf": (1, "inf")}


def test_tensors_larger_than_a_slice(
    holdfast: Command, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.diff._SLICE_ITEMS", 10)
    monkeypatch.setattr("holdfast.cli.diff._BATCH_BYTES", 100)
    other = torch.zeros(95)
    other[[3, 50, 94]] = torch.tensor([1.0, -5.0, 2.0])
    put(pair[0], x=torch.zeros(95), y=torch.zeros(20), z=torch.zeros(3))
    put(pair[1], x=other, y=torch.zeros(20), z=torch.ones(3))
    found = changes(holdfast, pair)
    assert list(found) == ["x", "z"]
    assert (found["x"]["num_changed"], found["x"]["max_abs"]) == (3, 5.0)
    assert found["x"]["mean_abs"] == pytest.approx(8 / 95)


def test_a_tied_name_is_compared_if_the_other_one_is_filtered_out(holdfast: Command, home: Path) -> None:
    result = holdfast("diff", f"{home}@100", f"{home}@200", "--filter", "*head", "--json")
    assert [change["name"] for change in result.json["changed"]] == ["model.head"]


def test_damage_is_an_error_and_not_a_difference(holdfast: Command, home: Path) -> None:
    flip(home / names.data(100, 1, 0))
    holdfast("diff", f"{home}@100", f"{home}@200").refused(names.data(100, 1, 0))


def test_a_home_may_have_an_at_sign_in_its_path(holdfast: Command, home: Path) -> None:
    odd = home.rename(home.with_name("run@lab"))
    assert holdfast("diff", odd, f"{odd}@300").status == 0
