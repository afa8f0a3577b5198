"""The run on a machine with a GPU: its time, its processes, and the rows of its summary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PATHS = [str(BENCHMARKS), str(BENCHMARKS / "gpu")]
BEFORE = list(sys.path)
sys.path.extend(PATHS)

import measure  # noqa: E402  # pyright: ignore[reportMissingImports]
import overlap  # noqa: E402  # pyright: ignore[reportMissingImports]
import parts  # noqa: E402  # pyright: ignore[reportMissingImports]
import source_path  # noqa: E402  # pyright: ignore[reportMissingImports]
import summary  # noqa: E402  # pyright: ignore[reportMissingImports]
from amounts import Amounts  # noqa: E402  # pyright: ignore[reportMissingImports]
from states import build  # noqa: E402  # pyright: ignore[reportMissingImports]

sys.path[:] = BEFORE  # their files would hide folders of tests with the same name

OWN = {"blocked_s": 0.002, "durable_s": 1.0, "lost_s": 0.01, "train_copy_s": 0.1}


def test_a_measurement_finds_the_packages_of_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    found = source_path.environment()["PYTHONPATH"].split(os.pathsep)
    assert found == [str(BENCHMARKS.parent / "src"), "/wheels"]
    monkeypatch.delenv("PYTHONPATH")
    assert source_path.environment()["PYTHONPATH"] == found[0]


def test_every_part_has_its_share_of_the_time_even_if_all_before_it_use_up_theirs() -> None:
    every = parts.list_parts("cuda")
    left_s = parts.BUDGET_S
    assert left_s <= 460.0
    for number, part in enumerate(every):
        limit_s = parts.limit_of(every[number + 1 :], left_s)
        assert limit_s >= part.share_s
        left_s -= limit_s


def test_a_part_may_use_what_those_before_it_have_left() -> None:
    every = parts.list_parts("cuda")
    assert parts.limit_of(every[2:], parts.BUDGET_S) == every[0].share_s + every[1].share_s


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is stopped"])
def test_orphans_in_sessions_of_their_own_end_with_their_part(tmp_path: Path, ends: bool) -> None:
    orphan, fifo = tmp_path / "orphan", tmp_path / "fifo"
    os.mkfifo(fifo)
    part = (
        "import pathlib, subprocess, sys\n"
        "one = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(orphan)!r}).write_text(str(one.pid))\n"
        f"open({str(fifo)!r}, 'w').close()\n"
        f"{'pass' if ends else 'one.wait()'}\n"
    )
    # The runner is a process of its own, as it adopts orphans. Its clock starts when the orphan has started.
    runner = (
        "import pathlib, subprocess, sys\n"
        f"sys.path.append({PATHS[1]!r})\n"
        "import descendants\n"
        "class Started(subprocess.Popen):\n"
        "    def wait(self, limit_s=None):\n"
        f"        limit_s and open({str(fifo)!r}).close()\n"
        "        return super().wait(limit_s)\n"
        "descendants.subprocess.Popen = Started\n"
        "with open(sys.argv[2], 'wb') as out:\n"
        "    command = [sys.executable, '-c', sys.argv[1]]\n"
        f"    limit_s = {600.0 if ends else 0.1}\n"
        "    print(descendants.run_alone(command, out, directory=pathlib.Path.cwd(), limit_s=limit_s))\n"
    )
    command = [sys.executable, "-c", runner, part, str(tmp_path / "log")]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=60, env=source_path.environment()
    )
    assert done.stdout.strip() == ("0" if ends else "None")
    pid = int(orphan.read_text())
    is_left = psutil.pid_exists(pid)
    if is_left:
        os.kill(pid, signal.SIGKILL)
    assert not is_left


def rows(name: str, part: dict[str, Any], gpu: str = "H100") -> list[Any]:
    whole = {"status": 0, "result": None, "output": ""} | part
    return summary.rows({"machine": {"gpu": gpu}, "parts": {name: whole}})


def run(contestant: str, **found: Any) -> dict[str, Any]:
    return {"round": 0, "state": "gpt2-124m", "contestant": contestant, **found}


def test_a_save_is_judged_by_the_copies_made_within_its_own_training() -> None:
    found = rows("stalls", {"result": {"runs": [run("holdfast", values=OWN)]}})
    assert [(row.found, row.verdict) for row in found] == [
        ("2.00 ms", "pass"),
        ("0.10", "pass"),
        ("1.00 s", ""),
    ]


def test_peers_are_not_judged() -> None:
    slow = OWN | {"blocked_s": 2.0, "lost_s": 3.0}
    found = rows(
        "peers", {"result": {"runs": [run("torch-save", values=slow), run("dcp-staged", error="x")]}}
    )
    assert len(found) == 4
    assert {(row.goal, row.verdict) for row in found} == {("", "")}


@pytest.mark.parametrize("gpu", ["H100", "cpu"])
def test_a_failed_measurement_of_holdfast_fails(gpu: str) -> None:
    (row,) = rows("stalls", {"status": 1, "result": {"runs": [run("holdfast", error="no space")]}}, gpu)
    assert (row.found, row.verdict) == ("no space", "FAIL")


def test_a_part_that_was_stopped_has_its_numbers_and_fails() -> None:
    part = {"status": None, "error": "stopped after 9 s", "result": {"runs": [run("holdfast", values=OWN)]}}
    found = rows("stalls", part)
    assert [row.verdict for row in found] == ["pass", "pass", "", "FAIL"]
    assert found[-1].found == "stopped after 9 s"


@pytest.mark.parametrize(("status", "result"), [(1, None), (0, None), (-11, {"runs": []})])
def test_a_part_that_crashed_fails(status: int, result: dict[str, Any] | None) -> None:
    (row,) = rows("stalls", {"status": status, "result": result, "output": "a\nb\n"})
    assert (row.what, row.found, row.verdict) == ("error", f"status {status}: b", "FAIL")


def test_tests_that_failed_fail() -> None:
    (row,) = rows("tests", {"status": 1, "output": "== 1 failed, 2 passed =="})
    assert row.verdict == "FAIL"
    (row,) = rows("tests", {"output": "== 3 passed =="})
    assert (row.found, row.verdict) == ("3 passed", "pass")


class Range(NamedTuple):
    start: float
    end: float


def event(name: str, start: float, end: float, *, kind: str = "CUDA", is_annotation: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=kind),
        time_range=Range(start, end),
        is_user_annotation=is_annotation,
    )


def test_annotations_are_no_kernels_and_pageable_copies_are_found() -> None:
    trace = [
        event("Memcpy DtoH (Device -> Pinned)", 0, 30),
        event("Memcpy DtoH (Device -> Pageable)", 30, 40),
        event("gemm", 10, 20),
        event("Optimizer.step", 0, 40, is_annotation=True),
        event("aten::add", 0, 40, kind="CPU"),
        event("Memset (Device)", 0, 40),
    ]
    found = overlap.summarize_trace(trace)
    assert found == {"num_copies": 2, "copied_s": 40e-6, "pinned_share": 0.75, "overlapped_share": 0.25}
    part = {"result": found | {"waited_s": 0.001, "queued_blocked_s": 0.5}}
    assert [row.verdict for row in rows("overlap", part)] == ["", "FAIL", "", "FAIL"]
    part = {"result": found | {"waited_s": 0.001, "queued_blocked_s": 0.001, "pinned_share": 1.0}}
    assert [row.verdict for row in rows("overlap", part)] == ["", "pass", "", "pass"]


def test_a_state_is_not_measured_on_a_disk_without_space_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = build("tiny")
    needed = 2 * subject.num_bytes + measure.MARGIN_BYTES
    monkeypatch.setattr(measure.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(RuntimeError, match=r"GB free; measuring tiny needs 2\.\d GB"):
        measure.measure("holdfast", lambda: subject, tmp_path, Amounts())
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(measure.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    measure.check_space(subject, tmp_path)


def test_amounts_are_the_same_in_the_process_that_measures() -> None:
    few = Amounts(compared=2, loads=0, timed=1, depths=(4,), has_unowned=False)
    assert Amounts.parse(few.text()) == few
