"""Output in the page: the newest lines first, then what follows, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from dash.client import Client
from dash.conftest import WAITS
from holdfast.jobs.dash.pages import MAX_BYTES, MAX_CHARS, MAX_LINES, plain_text
from holdfast.jobs.engine import Job
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness


def texts(found: dict) -> list[str]:
    """Return the texts of the lines."""
    return [line["text"] for line in found["lines"]]


@pytest.fixture
def job(jobs: JobHarness) -> Iterator[Job]:
    """A running job, whose log grows when the test writes to it."""
    job = jobs.submit(f"echo begins; {WAITS}")
    jobs.wait(job, JobStatus.RUNNING)
    jobs.wait_for_output(job, "begins")
    yield job
    jobs.finish(job)


def test_a_growing_log_is_followed_to_its_end(jobs: JobHarness, client: Client, job: Job) -> None:
    path = f"api/jobs/{job.id}/output"
    first = client.get(path).json
    assert texts(first)[-1] == "begins"
    assert (first["is_end"], first["skipped_bytes"]) == (False, 0)
    assert abs(first["lines"][-1]["unix_s"] - job.submitted_unix_s) < 600
    again = client.get(path, query=f"after={first['cursor']}")
    assert again.json["lines"] == []
    assert client.get(path, query=f"after={first['cursor']}", tag=again.headers["ETag"]).status == 304
    with jobs.files(job).log(0).open("ab", buffering=0) as log:
        log.write(b"whole\nhal")
        second = client.get(path, query=f"after={first['cursor']}").json
        assert texts(second) == ["whole"]
        log.write(b"f\n\r 10%\r 50%")
        third = client.get(path, query=f"after={second['cursor']}").json
        assert (texts(third), third["progress"]) == (["half"], [{"node": 0, "text": " 50%"}])
        log.write(b"\r100%\nunfinished")
        fourth = client.get(path, query=f"after={third['cursor']}").json
        assert (texts(fourth), fourth["progress"]) == (["100%"], [])
    jobs.finish(job)
    last = client.get(path, query=f"after={fourth['cursor']}").json
    assert texts(last)[0].startswith("unfinished")
    assert last["is_end"]
    after = client.get(path, query=f"after={last['cursor']}").json
    assert (after["lines"], after["cursor"]) == ([], last["cursor"])


def test_a_long_log_is_read_from_its_end(jobs: JobHarness, client: Client, job: Job) -> None:
    """A hole stands for the first gigabyte: reading it would take its memory all the same."""
    path = f"api/jobs/{job.id}/output"
    first = client.get(path).json
    with jobs.files(job).log(0).open("r+b") as log:
        log.truncate(1 << 30)
        log.seek(0, 2)
        log.write(b"".join(b"\nline %d" % number for number in range(100_000)) + b"\n")
    tracemalloc.start()
    for query in ("", f"after={first['cursor']}"):
        found = client.get(path, query=query).json
        assert texts(found)[-1] == "line 99999"
        assert len(found["lines"]) == MAX_LINES
        assert found["skipped_bytes"] > 1 << 30
        assert found["skipped_lines"] > 0
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 40 * MAX_BYTES


def test_one_endless_line_is_shown_in_parts(jobs: JobHarness, client: Client, job: Job) -> None:
    jobs.files(job).log(0).write_bytes(b"x" * (4 * MAX_BYTES))
    found = client.get(f"api/jobs/{job.id}/output").json
    assert all(line["text"].startswith("xxx") for line in found["lines"])
    assert all(len(line["text"]) < MAX_CHARS + 100 for line in found["lines"])
    assert found["skipped_bytes"] == 3 * MAX_BYTES


def test_an_emptied_log_is_read_from_its_start(jobs: JobHarness, client: Client, job: Job) -> None:
    cursor = client.get(f"api/jobs/{job.id}/output").json["cursor"]
    jobs.files(job).log(0).write_bytes(b"anew\n")
    assert texts(client.get(f"api/jobs/{job.id}/output", query=f"after={cursor}").json) == ["anew"]


def test_nodes_are_labelled_in_the_order_of_their_times(jobs: JobHarness, client: Client) -> None:
    job = jobs.wait(jobs.submit("echo from $SKYPILOT_NODE_RANK", head="num_nodes: 2"))
    found = client.get(f"api/jobs/{job.id}/output").json
    assert {(line["node"], line["text"]) for line in found["lines"]} >= {(0, "from 0"), (1, "from 1")}
    assert [line["unix_s"] for line in found["lines"]] == sorted(line["unix_s"] for line in found["lines"])
    assert {cursor.split(":")[0] for cursor in found["cursor"].split(",")} == {"0", "1"}
    assert client.get(f"api/jobs/{job.id}/output", query=f"after={found['cursor']}").json["lines"] == []
    only = client.get(f"api/jobs/{job.id}/output", query="node=1").json
    assert {line["node"] for line in only["lines"]} == {1}


def test_a_cursor_is_checked(jobs: JobHarness, client: Client) -> None:
    job = jobs.wait(jobs.submit("true"))
    known = ("", "after=0:9999999999999999", "after=7:1", "after=0%3A0", "node=0", "&&&&&&&&&&=;")
    cursors = ("x", "0:", "0:-5", "0:1,", "0:99999999999999999999", "0:1;1:1", "../0")
    wrong = [f"after={cursor}" for cursor in cursors] + ["node=x", "node=-1", "node=../0", "node=0%0A"]
    for status, queries in ((200, known), (400, wrong), (404, ["node=1"])):
        for query in queries:
            assert client.get(f"api/jobs/{job.id}/output", query=query).status == status, query


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[38;5;1mred\x1b[K", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x00b", "a\\x00b"),
        ("\u202eabc", "\\u202eabc"),
        ("<b>", "<b>"),
        ("x" * (MAX_CHARS + 1), "x" * MAX_CHARS + "... (1 character more)"),
    ],
)
def test_control_sequences_of_terminals_are_left_out(written: str, shown: str) -> None:
    assert plain_text(written) == shown
