"""Task files for SkyPilot, and its statuses of jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from holdfast.errors import RetryLater
from holdfast.jobs.sky.commands import parse_queue
from holdfast.jobs.sky.engine import SkyEngine, managed_name, render_document
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import Task
from holdfast.jobs.task.parser import Overrides, parse_tasks

TASK = """
name: gpt
resources:
  accelerators:
    A100:1
    H100:1
  use_spot: true
  job_recovery: {strategy: FAILOVER, max_restarts_on_errors: 2, recover_on_exit_codes: 33}
file_mounts:
  /plain: {name: a, mode: MOUNT}
  /cached: {name: b, mode: MOUNT_CACHED}
  /chosen: {name: c, mode: MOUNT_CACHED, config: {mount_cached: {transfers: 8, buffer_size: 16M}}}
  /copy: ~/data
envs: {LR: 1}
secrets: {TOKEN: null}
config: {hooks: [{run: echo mine, events: [down]}]}
setup: pip install torch-holdfast
run: |
  python train.py
"""
HANDED = """\
name: gpt
resources:
  accelerators:
    A100: 1
    H100: 1
  use_spot: true
  job_recovery:
    strategy: FAILOVER
    max_restarts_on_errors: 2
    recover_on_exit_codes:
    - 33
    - 63
    - 75
file_mounts:
  /plain:
    name: a
    mode: MOUNT
  /cached:
    name: b
    mode: MOUNT_CACHED
    config:
      mount_cached:
        transfers: 1
  /chosen:
    name: c
    mode: MOUNT_CACHED
    config:
      mount_cached:
        transfers: 8
        buffer_size: 16M
  /copy: ~/data
envs:
  LR: '1'
  HOLDFAST_TASK_ID: id-7
  HOLDFAST_JOB: '7'
  HOLDFAST_PREEMPTION: auto,file:/tmp/holdfast-notice-id-7
secrets:
  TOKEN: null
config:
  hooks:
  - run: echo mine
    events:
    - down
  - run: |-
      touch /tmp/holdfast-notice-id-7
      sleep 55
    events:
    - preemption
    timeout: 60
setup: |-
  export SKYPILOT_TASK_ID="$HOLDFAST_TASK_ID"  # the same after every recovery
  pip install torch-holdfast
run: |
  export SKYPILOT_TASK_ID="$HOLDFAST_TASK_ID"  # the same after every recovery
  python train.py
"""


def task(text: str) -> Task:
    return parse_tasks(text, "task.yaml", Overrides(secrets={"TOKEN": "abc123"})).only()


def test_the_file_makes_preemptions_lose_nothing_and_contains_no_secret() -> None:
    assert render_document(task(TASK), "id-7", "7") == HANDED


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [
        ("", {"recover_on_exit_codes": [63, 75]}),
        ("job_recovery: FAILOVER", {"strategy": "FAILOVER", "recover_on_exit_codes": [63, 75]}),
        ("job_recovery: {recover_on_exit_codes: [75, 3]}", {"recover_on_exit_codes": [3, 63, 75]}),
    ],
)
def test_a_training_that_has_saved_is_always_restarted(recovery: str, expected: dict[str, object]) -> None:
    text = render_document(task(f"resources: {{{recovery}}}\nrun: x"), "id", "1")
    assert yaml.safe_load(text)["resources"]["job_recovery"] == expected


def test_the_user_s_own_sources_of_notices_are_kept() -> None:
    text = render_document(task("envs: {HOLDFAST_PREEMPTION: aws}\nrun: x"), "id", "1")
    assert yaml.safe_load(text)["envs"]["HOLDFAST_PREEMPTION"] == "aws,file:/tmp/holdfast-notice-id"


def test_a_relative_workdir_is_resolved_against_the_current_directory() -> None:
    asked = task("workdir: .\nrun: x")
    assert yaml.safe_load(render_document(asked, "id", "1"))["workdir"] == asked.workdir


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt", "gpt-3"), ("My job!", "My-job-3"), ("3b", "job-3b-3"), ("...", "job-3")],
)
def test_names_are_valid_for_skypilot(name: str, expected: str) -> None:
    assert managed_name(name, "3") == expected


def test_added_keys_are_reported_and_that_a_cache_is_not_durable() -> None:
    told = {found_key.key: found_key for found_key in SkyEngine(Path()).unsupported_keys(task(TASK))}
    assert "75" in told["resources.job_recovery"].what
    assert "hook" in told["config.hooks"].what
    assert "transfers: 1" in told["file_mounts./cached"].what
    assert "transfers: 1" not in told["file_mounts./chosen"].what
    for key in ("file_mounts./cached", "file_mounts./chosen"):
        assert "lost if the machine is preempted" in told[key].what
    assert "file_mounts./plain" not in told


def test_the_queue_is_parsed() -> None:
    rows = [
        {"job_id": 2, "job_name": "a", "status": "RECOVERING", "recovery_count": 3, "start_at": 5.0},
        {"job_id": 1, "job_name": "b", "status": "FAILED_NO_RESOURCE", "failure_reason": "no", "end_at": 9.0},
        {"job_id": None, "status": "RUNNING"},
    ]
    first, second = parse_queue("Fetching...\n" + json.dumps(rows))
    assert (first.id, first.status, first.recoveries) == ("2", JobStatus.RECOVERING, 3)
    assert (second.status, second.reason) == (JobStatus.FAILED, "FAILED_NO_RESOURCE: no")
    assert (first.started_unix_s, second.ended_unix_s) == (5.0, 9.0)
    assert parse_queue("") == []


@pytest.mark.parametrize("word", [one.value for one in JobStatus if not one.is_final] + ["SUBMITTED"])
def test_a_status_that_is_not_final_has_no_end(word: str) -> None:
    (found,) = parse_queue(json.dumps([{"job_id": 1, "status": word, "end_at": 1.0}]))
    assert not found.status.is_final
    assert found.ended_unix_s is None


@pytest.mark.parametrize("text", ["[nonsense", '[{"job_id": 1, "status": "NEW"}]', "[1]"])
def test_invalid_output_is_reported(text: str) -> None:
    with pytest.raises(RetryLater, match="Cannot parse SkyPilot's queue"):
        parse_queue(text)
