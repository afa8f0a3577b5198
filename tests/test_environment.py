"""Environment variables of launchers: integers that are none raise an error with name and value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.adapters.nebula.tag_writer import own_rank, world
from holdfast.checkpoint.ranks import Ranks
from holdfast.errors import InvalidInput
from holdfast.jobs.journal import write_document
from holdfast.jobs.node_spec import Environment
from holdfast.jobs.records import JobSpec, Submission, write_submission
from holdfast.jobs.slurm.controller import SlurmController
from holdfast.jobs.slurm.job_files import JobFiles
from holdfast.jobs.slurm.runner import run_node
from holdfast.jobs.state_machine import RestartPolicy
from holdfast.system.environment import (
    PROGRESS,
    JobReport,
    ReportedProgress,
    read_integer,
    read_progress,
    report_to_job,
)
from holdfast.train.batch.finder import find_memory_limit
from holdfast.train.sharding.process_group import ensure_process_group


def test_an_integer_is_read_and_an_empty_value_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert read_integer("SLURM_NODEID", 7) == 7
    for value, expected in (("", 7), (" 3 ", 3), ("0", 0)):
        monkeypatch.setenv("SLURM_NODEID", value)
        assert read_integer("SLURM_NODEID", 7) == expected


@pytest.mark.parametrize("value", ["two", "-1", "1.5", "0x2", "\u0663", "1_000", "9" * 5000, "2(x3)"])
def test_another_value_is_an_error_with_what_is_expected(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SLURM_NODEID", value)
    match = r"SLURM_NODEID is .*, expected an integer of at least 0"
    with pytest.raises(InvalidInput, match=match) as raised:
        read_integer("SLURM_NODEID", 0)
    assert repr(value[:100]) in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_value_below_the_minimum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(InvalidInput, match="WORLD_SIZE is '0', expected an integer of at least 1"):
        read_integer("WORLD_SIZE", 1, minimum=1)


READERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "Checkpointer": ("WORLD_SIZE", lambda: Ranks(timeout_s=1.0)),
    "holdfast.shard": ("WORLD_SIZE", lambda: ensure_process_group("cpu")),
    "Nebula": ("WORLD_SIZE", world),
    "Nebula's rank": ("RANK", own_rank),
    "batch size": ("LOCAL_WORLD_SIZE", lambda: find_memory_limit(torch.device("cpu"), 0)),
}


@pytest.mark.parametrize("reader", READERS)
def test_variables_of_torchrun_are_checked(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    name, read = READERS[reader]
    monkeypatch.setenv(name, "many")
    with pytest.raises(InvalidInput, match=f"{name} is 'many'"):
        read()


STARTS: dict[str, Callable[[JobFiles], Any]] = {
    "SLURM_NODEID": lambda folder: run_node(folder, 1, ["127.0.0.1"], 30.0),
    "SLURM_GPUS_ON_NODE": lambda folder: run_node(folder, 1, ["127.0.0.1"], 30.0),
    "SLURM_RESTART_COUNT": SlurmController,
}


@pytest.mark.parametrize("name", STARTS)
def test_variables_of_slurm_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    folder = JobFiles(tmp_path / "3")
    folder.path.mkdir()
    policy = RestartPolicy(2, 1, frozenset(), grace_s=9.0)
    write_submission(folder, Submission(3, "n", "id", "slurm", JobSpec(1, 0, False, "me"), policy, 1.0))
    write_document(folder.environment, Environment({}, {}))
    folder.create()
    monkeypatch.setenv(name, "many")
    with pytest.raises(InvalidInput, match=f"{name} is 'many'"):
        STARTS[name](folder)


def test_reports_of_a_training_are_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert read_progress(path) == ReportedProgress()
    monkeypatch.setenv(PROGRESS, str(path))
    report_to_job(JobReport(home="runs/x", step=5))
    assert read_progress(path) == ReportedProgress({"runs/x": 5})
    report_to_job(JobReport(preempted=6))
    size = path.stat().st_size
    found = read_progress(path)
    assert (found.was_preempted, found.is_preempted) == (True, True)
    assert read_progress(path, after=size) == ReportedProgress(), "it was another start"
    report_to_job(JobReport(home="runs/x", step=5))
    found = read_progress(path)
    assert (found.was_preempted, found.is_preempted) == (True, False), "the training was started again"
    with path.open("a") as file:
        file.write('{"preempted": 7')  # torn by a kill
    assert read_progress(path, after=size) == ReportedProgress({"runs/x": 5})
    assert read_progress(path).newest_step == 5
