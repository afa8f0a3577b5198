"""`holdfast verify` finds all damage, names it and says so with its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Command, flip
from holdfast.format import names


def test_good_newest_is_good(holdfast: Command, home: Path) -> None:
    said = holdfast("verify", home)
    assert said.status == 0
    assert said.out.startswith("step 300, attempt 2: good (5 files, ")


def test_all_takes_every_one_with_a_manifest(holdfast: Command, home: Path) -> None:
    found = holdfast("verify", home, "--all", "--json")
    assert found.status == 0
    rows = found.json["checkpoints"]
    assert [(r["step"], r["attempt"]) for r in rows] == [(300, 2), (250, 2), (300, 1), (200, 1), (100, 1)]
    assert all(row["good"] and row["bytes"] > 8192 and not row["problems"] for row in rows)


def test_a_flipped_bit_is_named_with_its_file_and_tensor(holdfast: Command, home: Path) -> None:
    flip(home / names.data(300, 2, 1), at=4096)
    said = holdfast("verify", home)
    assert said.status == 1
    assert "step 300, attempt 2: DAMAGED, 1 problem" in said.out
    assert names.data(300, 2, 1) in said.out
    assert "model.bias[0]" in said.out


def test_every_problem_is_named_not_only_the_first(holdfast: Command, home: Path) -> None:
    flip(home / names.data(300, 2, 0))
    (home / names.data(300, 2, 1)).unlink()
    said = holdfast("verify", home, "--json")
    assert said.status == 1
    problems = said.json["checkpoints"][0]["problems"]
    assert {problem["kind"] for problem in problems} == {"corrupt", "not-found"}
    assert {problem["rank"] for problem in problems} == {0, 1}


@pytest.mark.parametrize("as_json", [False, True])
def test_an_unreadable_manifest_is_damage(holdfast: Command, home: Path, as_json: bool) -> None:
    flip(home / names.manifest(300, 2), at=100)
    said = holdfast("verify", home, *["--json"] * as_json)
    assert said.status == 1
    assert "seal" in said.out


def test_damage_elsewhere_does_not_touch_the_step_asked_for(holdfast: Command, home: Path) -> None:
    flip(home / names.data(300, 2, 0))
    assert holdfast("verify", home, "--step", 100).status == 0
    assert holdfast("verify", home, "--step", 300, "--attempt", 1).status == 0
    said = holdfast("verify", home, "--all")
    assert said.status == 1
    assert "5 checkpoints verified, 1 damaged" in said.out


def test_extra_files_are_told_and_harmless(holdfast: Command, home: Path) -> None:
    (home / "step-00000300" / "rank-00007-a0002.safetensors").write_bytes(b"left behind")
    said = holdfast("verify", home)
    assert said.status == 0
    assert "harmless: step-00000300/rank-00007-a0002.safetensors" in said.out


def test_nothing_to_verify_is_trouble(holdfast: Command, home: Path) -> None:
    for words in (("--step", 400), ("--step", 7), ("--attempt", 9)):
        said = holdfast("verify", home, *words)
        assert said.status == 2
        assert "300 (attempt 2)" in said.err
