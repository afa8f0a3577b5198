"""The list of jobs and the page of each job: their facts, as text, and only when something has changed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dash.client import Client
from dash.conftest import WAITS
from holdfast.checkpoint.store import open_store
from holdfast.errors import RetryLater
from holdfast.jobs import description, folder, interface
from holdfast.jobs.dash import pages
from holdfast.jobs.dash.pages import RunPlace
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness
from making import make_home

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


def test_active_jobs_come_first_with_durations_that_grow_in_the_browser(jobs: JobHarness, client: Client):
    assert client.get("api/jobs").json == {"jobs": [], "left_out": 0, "problems": [], "homes": []}
    running = jobs.submit(WAITS, head="name: long")
    ended = jobs.wait(jobs.submit("exit 3", head="name: short"))
    jobs.wait(running, JobStatus.RUNNING)
    first, second = client.get("api/jobs").json["jobs"]
    assert [first["id"], second["id"]] == [running.id, ended.id]
    assert (first["status"], first["grows"], first["is_final"]) == ("RUNNING", "running", False)
    assert first["submitted_unix_s"] <= first["as_of_unix_s"]
    assert (second["status"], second["grows"], second["exit_status"]) == ("FAILED", "", 3)
    assert second["as_of_unix_s"] == second["ended_unix_s"]
    assert second["reason"].splitlines()[0] == "node 0 failed in run with status 3"
    jobs.finish(running)
    assert [row["status"] for row in client.get("api/jobs").json["jobs"]] == ["FAILED", "SUCCEEDED"]


def test_durations_are_those_of_the_command_line(jobs: JobHarness, client: Client) -> None:
    """The first attempt is lost, and the second succeeds."""
    job = jobs.submit(f"if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 1000; fi; {WAITS}")
    jobs.wait(job, JobStatus.RUNNING)
    jobs.kill_node(job, 0)
    jobs.wait_for(job, lambda: jobs.engine.job(job.id).attempt == 2, "the second attempt")
    jobs.wait(job, JobStatus.RUNNING)
    ended = jobs.finish(job)
    (row,) = client.get("api/jobs").json["jobs"]
    found = interface.describe(job.id)
    assert row["running_s"] == found.durations.running_s > 0
    assert row["down_s"] == found.durations.down_s > 0
    page = client.get(f"api/jobs/{job.id}").json
    assert page["job"] == row
    assert page["lost_s"] == found.lost_s
    assert [(one["number"], one["exits"]) for one in page["attempts"]] == [(1, ["lost"]), (2, ["0"])]
    assert page["attempts"][0]["ended_unix_s"] <= page["attempts"][1]["started_unix_s"]
    assert page["job"]["ended_unix_s"] == ended.ended_unix_s
    assert page["logs"] == [str(jobs.files(job).log(0))]


def test_an_unchanged_version_is_not_sent_again(jobs: JobHarness, client: Client) -> None:
    """The durations of a running job grow in the browser, so that its response stays the same."""
    job = jobs.submit(WAITS)
    jobs.wait(job, JobStatus.RUNNING)
    for path in ("api/jobs", f"api/jobs/{job.id}"):
        first = client.get(path)
        again = client.get(path, tag=first.headers["ETag"])
        assert (again.status, again.content) == (304, b"")
        assert again.headers["ETag"] == first.headers["ETag"]
        assert client.get(path, tag='"other"').status == 200
    tag = client.get("api/jobs").headers["ETag"]
    jobs.finish(job)
    assert client.get("api/jobs", tag=tag).status == 200


def test_texts_of_strangers_are_data(jobs: JobHarness, client: Client) -> None:
    """The browser test shows that the page inserts them as text."""
    progress = json.dumps({"home": f"/runs/{HOSTILE}", "step": 7})
    script = f"cat >> $HOLDFAST_PROGRESS <<'END'\n{progress}\nEND\ncat <<'END'\n{HOSTILE}\nEND\nexit 4"
    job = jobs.submit(script, head=f"name: {json.dumps(HOSTILE)}")
    jobs.wait(job)
    for path in ("api/jobs", f"api/jobs/{job.id}", f"api/jobs/{job.id}/output"):
        answer = client.get(path)
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert HOSTILE in json.dumps(answer.json, ensure_ascii=False).replace('\\"', '"')
    page = client.get(f"api/jobs/{job.id}").json
    assert page["job"]["name"] == HOSTILE
    (home,) = page["homes"]
    assert (home["place"], home["step"]) == (f"/runs/{HOSTILE}", 7)
    answer = client.get(f"api/jobs/{job.id}/homes/{home['id']}/curves")
    assert (answer.status, HOSTILE in answer.json["error"]) == (404, True)


def test_of_many_ended_jobs_the_newest_are_listed(
    jobs: JobHarness, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_ENDED", 1)
    ended = [jobs.wait(jobs.submit("true")) for _ in range(2)]
    found = client.get("api/jobs").json
    assert ([row["id"] for row in found["jobs"]], found["left_out"]) == ([ended[1].id], 1)
    assert client.get(f"api/jobs/{ended[0].id}").status == 200, "its own page is shown"


def test_an_engine_that_does_not_answer_is_reported_and_its_jobs_stay(
    jobs: JobHarness, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.wait(jobs.submit("true"))
    assert len(client.get("api/jobs").json["jobs"]) == 1

    def fail(*, on: str) -> list[interface.Job]:
        raise RetryLater("squeue did not answer.")

    monkeypatch.setattr(pages, "queue", fail)
    found = client.get("api/jobs").json
    assert [row["id"] for row in found["jobs"]] == [job.id]
    assert found["problems"] == ["Jobs on local: squeue did not answer."]


def test_a_damaged_record_is_reported(jobs: JobHarness, client: Client) -> None:
    job = jobs.wait(jobs.submit("true"))
    for path in jobs.files(job).submissions:
        path.write_text("{")
    found = client.get("api/jobs").json
    assert found["jobs"] == []
    assert f"job {job.id}" in found["problems"][0]
    assert client.get(f"api/jobs/{job.id}").status == 404


def test_jobs_are_read_once_for_several_pages(
    jobs: JobHarness, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MIN_AGE_S", 1e6)
    job = jobs.wait(jobs.submit("true"))
    calls: list[str] = []

    def count(*, on: str) -> list[interface.Job]:
        calls.append(on)
        return interface.queue(on=on)

    monkeypatch.setattr(pages, "queue", count)
    client = connect()
    for path in ("api/jobs", f"api/jobs/{job.id}", f"api/jobs/{job.id}/output", "api/jobs"):
        assert client.get(path).status == 200
    assert calls == ["local"]


def test_a_state_folder_that_does_not_answer_stops_no_page(
    jobs: JobHarness, connect: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is away. Each request for a job kept one of the few threads of the dash for ever."""
    home = tmp_path / "home"
    make_home(open_store(str(home)))
    script = f"cat >> $HOLDFAST_PROGRESS <<'END'\n{json.dumps({'home': str(home), 'step': 3})}\nEND"
    job = jobs.wait(jobs.submit(script))
    curves = f"homes/{RunPlace(str(home)).id}/curves"
    of_job = [f"api/jobs/{job.id}{path}" for path in ("", "/output", f"/{curves}")]
    early, late, answers = connect(str(home)), connect(str(home)), threading.Event()
    monkeypatch.setattr(pages, "WAIT_S", 600.0)
    rows = early.get("api/jobs").json["jobs"]
    assert [early.get(path).status for path in of_job] == [200] * 3

    def stalled() -> Path:
        answers.wait(600)
        return folder.state_dir()

    for module in (pages, description):
        monkeypatch.setattr(module, "state_dir", stalled)
    monkeypatch.setattr(pages, "WAIT_S", 0.05)
    for client, shown in ((early, rows), (late, [])):
        listed = client.get("api/jobs")
        assert (listed.status, listed.json["jobs"]) == (200, shown)
        assert "The list of jobs has not answered for" in listed.json["problems"][0]
        for path in of_job:
            answer = client.get(path)
            assert (answer.status, "has not answered for" in answer.json["error"]) == (503, True), path
        assert client.get(f"api/{curves}").status == 200
    answers.set()
    monkeypatch.setattr(pages, "WAIT_S", 600.0)
    for client in (early, late):
        assert [client.get(path).status for path in ("api/jobs", *of_job)] == [200] * 4
    assert early.get("api/jobs").json["jobs"] == rows
