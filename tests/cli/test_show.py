"""`holdfast show` prints the contents of a checkpoint."""

from __future__ import annotations

import argparse
import collections
import decimal
import uuid
from pathlib import Path

import numpy as np
import pytest

from cli.conftest import Command, flip
from holdfast.checkpoint.format import names, values
from holdfast.checkpoint.format.values import SavedDataclass, SavedEnum, SavedNamedTuple
from holdfast.cli.values import format_value, leaves


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


def test_names_are_printed_unchanged(holdfast: Command, home: Path) -> None:
    """Brackets in names are not markup, and names are not shortened in a pipe."""
    out = holdfast("show", home).out
    assert "4 tensors" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["model.bias[0]"] == ["model.bias[0]", "I64", "[5]", "40", "B", "rank", "1"]
    assert rows["rng.torch"][-2:] == ["each", "rank"]
    assert rows["model.head"][-1] == "model.weight"
    assert rows["optimizer.groups[0].betas"] == ["optimizer.groups[0].betas", "(0.9,", "0.95)"]


def test_filter_narrows_tensors_and_values(holdfast: Command, home: Path) -> None:
    out = holdfast("show", home, "--filter", "optimizer.*").out
    assert "0 tensors" in out
    assert "optimizer.groups[0].lr" in out
    assert "epoch" not in out
    found = holdfast("show", home, "--filter", "*.weight", "--json").json
    assert [tensor["name"] for tensor in found["tensors"]] == ["model.weight"]


def test_rank_chooses_the_values_of_a_rank_and_missing_ranks_and_steps_are_refused(
    holdfast: Command, home: Path
) -> None:
    assert holdfast("show", home, "--rank", 1, "--json").json["values"]["seed"] == 1
    holdfast("show", home, "--rank", 2).refused("saved by 2 ranks, so rank 2 does not exist")
    holdfast("show", home, "--step", 7).refused("300", "100")


def test_an_unreadable_newest_checkpoint_is_skipped_and_a_damaged_part_is_damage(
    holdfast: Command, home: Path
) -> None:
    flip(home / names.manifest(300, 2))
    result = holdfast("show", home, "--json")
    assert result.json["step"] == 250
    assert "skipped step 300" in result.err
    flip(home / names.part(250, 2, 0))
    holdfast("show", home).refused(names.part(250, 2, 0), status=1)


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
        (decimal.Decimal("1.50"), "1.50"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (slice(1, None, 2), "slice(1, None, 2)"),
        (SavedEnum("train:Outer.Phase", "WARM"), "Phase.WARM"),
        (SavedDataclass("train:Config", {"lr": 0.5, "tags": {"a"}}), "Config(lr=0.5, tags={'a'})"),
        (SavedNamedTuple("train:Point", (("x", 1), ("y", (2,)))), "Point(x=1, y=(2))"),
        (argparse.Namespace(a=[1]), "namespace(a=[1])"),
        (np.zeros(3, [("a", "i4"), ("b", "f8")]), "array with fields a, b, shape [3]"),
    ],
)
def test_a_value_is_formatted_as_python_does(value: object, text: str) -> None:
    assert format_value(values.encode(value, "v")) == text


def test_long_values_are_shortened_and_counted() -> None:
    assert format_value(list(range(1000))).endswith("... 1000 in all]")
    assert len(format_value("x" * 10_000)) <= 100


FIELDS = {
    "config": SavedDataclass("t:Config", {"lr": 0.5, "points": [SavedNamedTuple("t:P", (("x", 1),))]}),
    "args": argparse.Namespace(a=1),
    "g": values.EntryRef("s.g"),
    "counts": collections.defaultdict(None, {1: 2}),
}
NESTED = {"a": 1, "b": {2: {"c": [{"d": 3}, {"d": values.TensorRef("t")}]}, "e": (1, 2)}, "f": [1, 2]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (FIELDS, {"s.config.lr": "0.5", "s.config.points[0].x": "1", "s.args.a": "1", "s.counts[1]": "2"}),
        (NESTED, {"s.a": "1", "s.b[2].c[0].d": "3", "s.b['e']": "(1, 2)", "s.f": "[1, 2]"}),
    ],
    ids=["fields", "mappings and lists"],
)
def test_leaves_are_the_values_without_tensors_and_objects(value: object, expected: dict[str, str]) -> None:
    found = {path: format_value(leaf) for path, leaf in leaves(values.encode(value, "s"), "s")}
    assert found == expected
