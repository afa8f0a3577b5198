"""`holdfast doctor`: whether a machine and a home are ready, each problem with its fix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Command
from holdfast.checkpoint.store import open_store
from holdfast.cli.doctor import _FIXES
from holdfast.jobs.node.checks.gate import make_plan
from servers import Server


def by_name(report: Any) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in report["checks"]}


def test_a_machine_and_a_home_that_are_ready(
    holdfast: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(home.rglob("*"))
    result = holdfast("doctor", home, "--json")
    assert (result.status, result.json["ready"]) == (0, True), result.out
    checks = by_name(result.json)
    assert set(checks) >= {"torch", "gpu", "open files", "keeper", "disk", "clock", "space", "memory", "home"}
    assert all(check["trouble"] == "" and check["fix"] is None for check in checks.values())
    assert checks["disk"]["values"]["write_s"] > 0
    assert sorted(home.rglob("*")) == files
    monkeypatch.setenv("COLUMNS", "80")
    lines = holdfast("doctor", home).printed("\nready\n").out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_a_home_that_does_not_exist_yet_is_not_created(holdfast: Command, tmp_path: Path) -> None:
    result = holdfast("doctor", tmp_path / "runs" / "new", "--json")
    assert result.status == 0, result.out
    assert by_name(result.json)["home"]["trouble"] == ""
    assert not (tmp_path / "runs").exists()


def test_a_damaged_home_is_a_problem(holdfast: Command, home: Path) -> None:
    (home / "holdfast.json").write_text("{")
    result = holdfast("doctor", home)
    result.printed(f"home {home}: ", "holdfast.json", _FIXES["home"], "1 problem found", status=1)


def test_a_folder_of_the_keeper_that_cannot_be_made_is_a_problem(
    holdfast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "file"))
    result = holdfast("doctor", "--json")
    assert (result.status, result.json["ready"]) == (1, False)
    check = by_name(result.json)["keeper"]
    assert "is not" in check["trouble"] or "None of" in check["trouble"]
    assert check["fix"] == _FIXES["keeper"]


def test_a_place_that_cannot_be_written_to_is_a_problem(holdfast: Command) -> None:
    """Not even root may create files there."""
    result = holdfast("doctor", "/proc/sys/run")
    result.printed("disk /proc/sys: it cannot be written to: ", _FIXES["disk"], status=1)


def run_alone(*words: str, num_files: int = 1024) -> tuple[int, Any]:
    """Run the command in a new process: a copy of one that has used a bucket has no threads for buckets."""
    limited = ["sh", "-c", 'ulimit -S -n "$0"; exec "$@"', str(num_files)]
    command = [*limited, sys.executable, "-m", "holdfast.cli", "doctor", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_low_limit_of_open_files_is_a_problem() -> None:
    """In a process of its own: that of the tests may have more files open."""
    _, report = run_alone(num_files=128)
    check = by_name(report)["open files"]
    assert check["where"] == "limit 128"
    assert check["trouble"] == "only 21 saves can wait in memory"
    assert "ulimit -n" in check["fix"]


def test_a_bucket_is_written_to_and_left_as_it_was(s3: Server) -> None:
    home = s3.home("doctored")
    status, report = run_alone(home)
    assert (status, by_name(report)["home"]["trouble"]) == (0, ""), report
    assert list(open_store(home).list()) == []


def test_a_bucket_that_does_not_answer_is_a_problem(s3: Server) -> None:
    home = s3.home("doctored", port=9)  # nobody listens there
    status, report = run_alone(home, "--patience", "1s")
    check = by_name(report)["home"]
    assert (status, check["fix"]) == (1, _FIXES["home"])
    assert "doctored" in check["trouble"]


def test_every_check_has_a_fix(tmp_path: Path) -> None:
    """Wrong bytes and products have one of their own."""
    names = {name.partition(" ")[0] for name in make_plan(tmp_path, tmp_path)}
    assert names - {"product", "copy"} <= set(_FIXES)
