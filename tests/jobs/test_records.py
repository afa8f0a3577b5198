"""The one row of numbers: jobs of all engines in one file, which older versions have made too."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput, NotFound
from holdfast.jobs.choice import choose_engine, find_engine
from holdfast.jobs.machine import Life, Terms
from holdfast.jobs.place import database, state_dir
from holdfast.jobs.records import Records, Spec, life_text, terms_text

SPEC = Spec(num_nodes=1, num_gpus=0, has_setup=False, user="me", gpus=[])
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


def test_jobs_of_all_engines_share_one_row_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    with Records(database(state_dir())) as records:
        for engine in ("slurm", "local", "sky"):
            number = records.reserve("n", SPEC, Terms(), 1.0, engine=engine)
            records.complete(number, f"id-{engine}")
        records.name_outside(1, "4711")
        assert [(one.id, one.engine, one.outer_id) for one in records.all()] == [
            (1, "slurm", "4711"),
            (2, "local", None),
            (3, "sky", None),
        ]
        assert [one.id for one in records.all("sky")] == [3]
        records.take_back(3)
        with pytest.raises(NotFound):
            records.get(3)
    assert (find_engine(1).name, find_engine(2).name) == ("slurm", "local")
    with pytest.raises(NotFound, match="no job 3"):
        find_engine(3)
    with pytest.raises(InvalidInput, match="no engine 'k8s'"):
        choose_engine("k8s")


def test_a_file_of_the_version_before_is_brought_up(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    old = sqlite3.connect(path)
    old.executescript(VERSION_1)
    spec = '{"num_nodes": 1, "num_gpus": 0, "has_setup": false, "user": "me", "gpus": []}'
    old.execute(
        "INSERT INTO jobs (name, task_id, is_whole, spec, terms, life, due, status, submitted_unix_s) "
        "VALUES ('old', 'id', 1, ?, ?, ?, '{}', 'RUNNING', 1.0)",
        (spec, terms_text(Terms()), life_text(Life())),
    )
    old.commit()
    old.close()
    for _ in range(2):
        with Records(path) as records:
            (found,) = records.all()
        assert (found.name, found.engine, found.outer_id) == ("old", "local", None)
