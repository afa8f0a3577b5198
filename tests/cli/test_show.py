"""`holdfast show` tells what is inside a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Command, flip
from holdfast.cli.values import leaves, say
from holdfast.format import names, values
from holdfast.store import open_store
from making import make_checkpoint, make_home


def test_newest_with_all_tensors_and_values(holdfast: Command, home: Path) -> None:
    found = holdfast("show", home, "--json").json
    assert (found["step"], found["attempt"], found["ranks"], found["base_step"]) == (300, 2, 2, 200)
    assert {tensor["name"]: tensor for tensor in found["tensors"]} == {
        name: {"name": name, "dtype": dtype, "shape": shape, "bytes": size, "owner": owner, "tied_to": tied}
        for name, dtype, shape, size, owner, tied in [
            ("model.weight", "F32", [30, 4], 480, 0, None),
            ("model.bias[0]", "I64", [5], 40, 1, None),
            ("rng.torch", "U8", [16], 16, "each", None),
            ("model.head", "F32", [30, 4], 480, 0, "model.weight"),
        ]
    }
    assert found["values"]["optimizer"] == {"groups": [{"lr": 0.5, "betas": {"$tuple": [0.9, 0.95]}}]}


def test_a_step_and_an_attempt_can_be_chosen(holdfast: Command, home: Path) -> None:
    assert holdfast("show", home, "--step", 100, "--json").json["step"] == 100
    assert holdfast("show", home, "--step", 300, "--json").json["attempt"] == 2
    assert holdfast("show", home, "--step", 300, "--attempt", 1, "--json").json["attempt"] == 1


def test_table_names_tensors_as_they_are(holdfast: Command, home: Path) -> None:
    """Brackets in names are not markup, and nothing is cut to the width of a terminal."""
    out = holdfast("show", home).out
    assert "4 tensors" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["model.bias[0]"] == ["model.bias[0]", "I64", "[5]", "40", "B", "rank", "1"]
    assert rows["rng.torch"][-2:] == ["each", "rank"]
    assert rows["model.head"][-1] == "model.weight"
    assert rows["optimizer.groups[0].betas"] == ["optimizer.groups[0].betas", "(0.9,", "0.95)"]


def test_long_names_are_whole_when_piped(holdfast: Command, tmp_path: Path) -> None:
    import torch

    name = ".".join(f"layer{i}" for i in range(60))
    store = open_store(tmp_path / "run")
    make_home(store)
    make_checkpoint(store, 1, tensors=[{name: torch.zeros(1)}])
    assert name in holdfast("show", tmp_path / "run").out


def test_filter_narrows_tensors_and_values(holdfast: Command, home: Path) -> None:
    out = holdfast("show", home, "--filter", "optimizer.*").out
    assert "0 tensors" in out
    assert "optimizer.groups[0].lr" in out
    assert "epoch" not in out
    found = holdfast("show", home, "--filter", "*.weight", "--json").json
    assert [tensor["name"] for tensor in found["tensors"]] == ["model.weight"]


def test_rank_chooses_whose_values(holdfast: Command, home: Path) -> None:
    assert holdfast("show", home, "--rank", 1, "--json").json["values"]["seed"] == 1
    said = holdfast("show", home, "--rank", 2)
    assert said.status == 2
    assert "saved by 2 ranks; there is no rank 2" in said.err


def test_an_unknown_step_lists_what_there_is(holdfast: Command, home: Path) -> None:
    said = holdfast("show", home, "--step", 7)
    assert said.status == 2
    assert "300" in said.err
    assert "100" in said.err


def test_an_unreadable_newest_is_passed_over_aloud(holdfast: Command, home: Path) -> None:
    flip(home / names.manifest(300, 2))
    said = holdfast("show", home, "--json")
    assert said.json["step"] == 250
    assert "passed over step 300" in said.err


def test_a_damaged_part_is_damage(holdfast: Command, home: Path) -> None:
    flip(home / names.part(300, 2, 0))
    said = holdfast("show", home)
    assert said.status == 1
    assert names.part(300, 2, 0) in said.err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("a [b]", "'a [b]'"),
        (2**70, str(2**70)),
        (float("nan"), "nan"),
        ((1, [2, "x"]), "(1, [2, 'x'])"),
        ({"b", "a"}, "{'a', 'b'}"),
        (b"12345", "5 bytes"),
        (bytearray(6), "6 bytes"),
        (range(3), "range [0, 3, 1]"),
    ],
)
def test_a_value_is_said_as_python_would(value: object, text: str) -> None:
    assert say(values.encode(value, "v")) == text


def test_long_values_are_cut_and_counted() -> None:
    assert say(list(range(1000))).endswith("... 1000 in all]")
    assert len(say("x" * 10_000)) <= 100


def test_leaves_go_into_mappings_and_lists_of_them_and_leave_tensors_out() -> None:
    value = {"a": 1, "b": {2: {"c": [{"d": 3}, {"d": values.TensorRef("t")}]}, "e": (1, 2)}, "f": [1, 2]}
    found = {path: say(leaf) for path, leaf in leaves(values.encode(value, "s"), "s")}
    assert found == {"s.a": "1", "s.b[2].c[0].d": "3", "s.b['e']": "(1, 2)", "s.f": "[1, 2]"}
