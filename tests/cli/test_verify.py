"""`holdfast verify` finds and reports all damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Command, flip
from holdfast.checkpoint.format import names


def test_good_checkpoints_pass_and_all_is_every_one_with_a_manifest(holdfast: Command, home: Path) -> None:
    result = holdfast("verify", home)
    assert result.status == 0
    assert result.out.startswith("step 300, attempt 2: good (5 files, ")
    found = holdfast("verify", home, "--all", "--json")
    assert found.status == 0
    rows = found.json["checkpoints"]
    assert [(r["step"], r["attempt"]) for r in rows] == [(300, 2), (250, 2), (300, 1), (200, 1), (100, 1)]
    assert all(row["good"] and row["bytes"] > 8192 and not row["problems"] for row in rows)


def test_a_flipped_bit_is_reported_with_its_file_and_tensor(holdfast: Command, home: Path) -> None:
    flip(home / names.data(300, 2, 1), at=4096)
    holdfast("verify", home).printed(
        "step 300, attempt 2: DAMAGED, 1 problem", names.data(300, 2, 1), "model.bias[0]", status=1
    )


def test_every_problem_is_reported(holdfast: Command, home: Path) -> None:
    flip(home / names.data(300, 2, 0))
    (home / names.data(300, 2, 1)).unlink()
    result = holdfast("verify", home, "--json")
    assert result.status == 1
    problems = result.json["checkpoints"][0]["problems"]
    assert {problem["kind"] for problem in problems} == {"corrupt", "not-found"}
    assert {problem["rank"] for problem in problems} == {0, 1}


@pytest.mark.parametrize("as_json", [False, True])
def test_an_unreadable_manifest_is_damage(holdfast: Command, home: Path, as_json: bool) -> None:
    flip(home / names.manifest(300, 2), at=100)
    holdfast("verify", home, *["--json"] * as_json).printed("seal", status=1)


def test_damage_of_other_steps_is_ignored(holdfast: Command, home: Path) -> None:
    flip(home / names.data(300, 2, 0))
    assert holdfast("verify", home, "--step", 100).status == 0
    assert holdfast("verify", home, "--step", 300, "--attempt", 1).status == 0
    holdfast("verify", home, "--all").printed("5 checkpoints verified, 1 damaged", status=1)


def test_extra_files_are_harmless_and_nothing_to_verify_is_an_error(holdfast: Command, home: Path) -> None:
    (home / "step-00000300" / "rank-00007-a0002.safetensors").write_bytes(b"left behind")
    holdfast("verify", home).printed("harmless: step-00000300/rank-00007-a0002.safetensors")
    for words in (("--step", 400), ("--step", 7), ("--attempt", 9)):
        holdfast("verify", home, *words).refused("300 (attempt 2)")
