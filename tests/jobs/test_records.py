"""Records of jobs: one file and id sequence for all engines, upgraded from older versions."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput, NotFound
from holdfast.jobs.records import JobSpec, Records, encode
from holdfast.jobs.registry import find_engine, get_engine
from holdfast.jobs.state_folder import database, state_dir
from holdfast.jobs.state_machine import JobState, RestartPolicy

SPEC = JobSpec(num_nodes=1, num_gpus=0, has_setup=False, user="me", gpus=[])
VERSION_1 = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, task_id TEXT,
    is_whole INTEGER NOT NULL DEFAULT 0, spec TEXT NOT NULL, terms TEXT NOT NULL, life TEXT NOT NULL,
    due TEXT NOT NULL, status TEXT NOT NULL, step_before INTEGER, submitted_unix_s REAL NOT NULL,
    started_unix_s REAL, ended_unix_s REAL
);
CREATE TABLE requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL REFERENCES jobs(id), kind TEXT NOT NULL,
    lead_s REAL, is_done INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX open_requests ON requests(job) WHERE is_done = 0;
PRAGMA user_version = 1;
"""


def test_jobs_of_all_engines_share_one_id_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    with Records(database(state_dir())) as records:
        for engine in ("slurm", "local", "sky"):
            number = records.reserve("n", SPEC, RestartPolicy(), 1.0, engine=engine)
            records.complete(number, f"id-{engine}")
        records.set_engine_job_id(1, "4711")
        assert [(one.id, one.engine, one.engine_job_id) for one in records.all()] == [
            (1, "slurm", "4711"),
            (2, "local", None),
            (3, "sky", None),
        ]
        assert [one.id for one in records.all("sky")] == [3]
        records.withdraw(3)
        with pytest.raises(NotFound):
            records.get(3)
    assert (find_engine(1).name, find_engine(2).name) == ("slurm", "local")
    with pytest.raises(NotFound, match="Job 3 does not exist"):
        find_engine(3)
    with pytest.raises(InvalidInput, match="Unknown engine 'nomad'"):
        get_engine("nomad")


def test_a_file_of_the_previous_version_is_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    old = sqlite3.connect(path)
    old.executescript(VERSION_1)
    spec = '{"num_nodes": 1, "num_gpus": 0, "has_setup": false, "user": "me", "gpus": []}'
    old.execute(
        "INSERT INTO jobs (name, task_id, is_whole, spec, terms, life, due, status, submitted_unix_s) "
        "VALUES ('old', 'id', 1, ?, ?, ?, '{}', 'RUNNING', 1.0)",
        (spec, encode(RestartPolicy()), encode(JobState())),
    )
    old.commit()
    old.close()
    for _ in range(2):
        with Records(path) as records:
            (found,) = records.all()
        assert (found.name, found.engine, found.engine_job_id) == ("old", "local", None)
