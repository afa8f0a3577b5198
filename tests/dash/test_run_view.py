"""Runs in the page: curves as in the report, and the report itself, of listed homes only."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dash.client import Client
from faulty_store import FaultyStore
from holdfast.checkpoint.store import open_store
from holdfast.errors import NotFound
from holdfast.jobs.dash import pages
from holdfast.jobs.dash.pages import RunPlace, find_place
from holdfast.watch.report import kept_readings
from holdfast.watch.report.figures import curves
from holdfast.watch.report.style import framed
from holdfast.watch.report.summary import read_summary
from jobs.harness import JobHarness
from making import make_home

METRIC = "<img src=x onerror=alert(3)>"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a history of two metrics."""
    place = tmp_path / "a <run>"
    store = open_store(place)
    make_home(store, attempts=(1,))
    line = {"event": "metrics", "t": 1.0, "attempt": 1, "rank": 0, "steps": [1, 2, 3]}
    line["values"] = {"loss": [3.0, 2.0, 1.0], METRIC: [1.0, 2.0, 3.0]}
    store.put("history/attempt-000001-rank-00000.jsonl", f"{json.dumps(line)}\n".encode())
    return place


def test_curves_are_those_of_the_report(connect: Callable[..., Client], home: Path) -> None:
    client = connect(str(home))
    (listed,) = client.get("api/jobs").json["homes"]
    assert (listed["place"], listed["is_remote"]) == (str(home), False)
    answer = client.get(f"api/homes/{listed['id']}/curves")
    drawn = curves(read_summary(open_store(home)))
    assert [(one["title"], one["spec"]) for one in answer.json["figures"]] == [
        (one.title, framed(one.chart or {})) for one in drawn.values()
    ]
    assert answer.json["figures"][1]["title"] == f"{METRIC}, step by step"
    assert client.get(f"api/homes/{listed['id']}/curves", tag=answer.headers["ETag"]).status == 304


def test_the_list_of_runs_has_the_state_of_each(connect: Callable[..., Client], home: Path, tmp_path: Path):
    client = connect(str(home), str(tmp_path / "empty"))
    found = client.get(f"api/homes/{RunPlace(str(home)).id}/state").json
    assert found == {"state": "not finished", "step": None, "last_unix_s": 1.0}
    numbers = client.get(f"api/homes/{RunPlace(str(home)).id}/curves").json["numbers"]
    assert numbers[0] == {"name": "Newest checkpoint", "value": "none", "remark": "home holds no checkpoint"}
    missing = client.get(f"api/homes/{RunPlace(str(tmp_path / 'empty')).id}/state")
    assert (missing.status, "does not contain a run yet" in missing.json["error"]) == (404, True)
    assert client.get("api/homes/0123456789abcdef/state").status == 404


def test_a_report_is_a_page_of_an_origin_of_its_own(connect: Callable[..., Client], home: Path) -> None:
    pytest.importorskip("vl_convert", reason="needs the extra `report`")
    client = connect(str(home))
    answer = client.get(f"api/homes/{RunPlace(str(home)).id}/report")
    assert answer.status == 200
    assert "<h1>a &lt;run&gt;</h1>" in answer.text
    assert METRIC not in answer.text.partition("<main>")[2].partition("</main>")[0]
    rules = answer.headers["Content-Security-Policy"].split("; ")
    assert "sandbox allow-scripts" in rules
    assert "default-src 'none'" in rules
    assert not any("allow-same-origin" in rule or "connect-src" in rule for rule in rules)


def test_a_home_of_a_job_is_shown_and_no_other(
    jobs: JobHarness, connect: Callable[..., Client], home: Path, tmp_path: Path
) -> None:
    script = f"cat >> $HOLDFAST_PROGRESS <<'END'\n{json.dumps({'home': str(home), 'step': 3})}\nEND"
    job, other = (jobs.wait(jobs.submit(run)) for run in (script, "true"))
    client = connect(str(tmp_path / "not yet"))
    place = RunPlace(str(home))
    assert client.get(f"api/jobs/{job.id}/homes/{place.id}/curves").status == 200
    for prefix in (f"api/jobs/{other.id}", "api", "api/jobs/9"):
        for what in ("curves", "report"):
            assert client.get(f"{prefix}/homes/{place.id}/{what}").status == 404, prefix
    missing = client.get(f"api/homes/{RunPlace(str(tmp_path / 'not yet')).id}/curves")
    assert missing.status == 404
    assert "does not contain a run yet" in missing.json["error"]


def test_a_home_that_does_not_answer_delays_no_other_page(
    connect: Callable[..., Client], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on a stalled disk stopped every page, as they were read with one lock held."""
    stalled = str(tmp_path / "stalled")
    store = FaultyStore(open_store(stalled))
    make_home(store)
    gate = store.hold("size")
    stores = {stalled: store}
    monkeypatch.setattr(pages, "open_store", lambda place: stores.get(place) or open_store(place))
    monkeypatch.setattr(kept_readings, "_WAIT_S", 0.05)
    client, path = connect(stalled, str(home)), f"api/homes/{RunPlace(stalled).id}/curves"
    asking = threading.Thread(target=client.get, args=(path,), daemon=True)
    asking.start()
    assert gate.reached.wait(60.0)
    asking.join()
    monkeypatch.setattr(kept_readings, "_WAIT_S", 60.0)
    assert client.get(f"api/homes/{RunPlace(str(home)).id}/curves").status == 200
    monkeypatch.setattr(kept_readings, "_WAIT_S", 0.05)
    answer = client.get(path)
    assert answer.status == 503
    assert f"{stalled} has not answered for" in answer.json["error"]
    assert len(store.calls("size")) == 1, "a second thread reads it"
    gate.opened.set()
    monkeypatch.setattr(kept_readings, "_WAIT_S", 60.0)
    assert client.get(path).status == 200


def test_a_home_of_another_kind_is_an_error_of_its_own(connect: Callable[..., Client]) -> None:
    places = ["ftp://host/run", "\0", ""]
    client = connect(*places)
    for place in places:
        answer = client.get(f"api/homes/{RunPlace(place).id}/curves")
        assert answer.status == 400, place
    assert client.get("api/jobs").status == 200


def test_buckets_are_marked_and_their_secrets_hidden() -> None:
    place = RunPlace("s3://bucket/run?secret_access_key=abcdefgh")
    assert place.is_remote
    assert "abcdefgh" not in json.dumps(place.as_json())
    assert not RunPlace("file:///runs/a").is_remote
    with pytest.raises(NotFound):
        find_place(["/a"], RunPlace("/b").id)
