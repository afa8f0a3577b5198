"""`holdfast metrics` as text, JSON, a file and a server."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from cli.conftest import Command
from faulty_store import FaultyStore
from holdfast.checkpoint.store import open_store
from holdfast.cli import metrics
from holdfast.watch.report import kept_readings


def families(text: str) -> dict[str, float]:
    """Return the unlabelled values, as the official parser reads them."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    found = parser.text_string_to_metric_families(text)
    return {sample.name: sample.value for family in found for sample in family.samples}


def test_text_and_json_are_those_of_the_run(holdfast: Command, home: Path) -> None:
    found = families(holdfast("metrics", home).out)
    newest = next(row for row in holdfast("ls", home, "--json").json["checkpoints"] if row["is_newest"])
    assert found["holdfast_checkpoint_step"] == newest["step"]
    assert found["holdfast_attempts_total"] >= 1
    rows = holdfast("metrics", home, "--json").json
    assert {"holdfast_checkpoint_step", "holdfast_steps_lost"} <= {row["name"] for row in rows}


def test_a_file_is_replaced_as_a_whole(holdfast: Command, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpt.prom"
    file.write_text("older")
    holdfast("metrics", home, "--output", file)
    assert file.read_text().endswith("# EOF\n")
    assert families(file.read_text())
    assert [one.name for one in tmp_path.iterdir() if one.name.endswith(".partial")] == []


def test_a_server_of_this_machine_sends_the_text(home: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "metrics", str(home), "--serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(url) as reply:
                assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
                assert families(reply.read().decode())["holdfast_attempts_total"] >= 1
            with pytest.raises(urllib.error.HTTPError) as missing:
                urllib.request.urlopen(url.replace("/metrics", "/other"))
            assert missing.value.code == 404
            missing.value.close()
        finally:
            process.kill()


def test_a_home_that_does_not_answer_is_an_error_of_each_request(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request waited for the same lock, for as long as the first one was read."""
    store = FaultyStore(open_store(home))
    gate = store.hold("get")
    monkeypatch.setattr(kept_readings, "_WAIT_S", 0.05)
    with ThreadingHTTPServer(("127.0.0.1", 0), metrics._handler(store)) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        try:
            for _ in range(2):
                with pytest.raises(urllib.error.HTTPError) as failed:
                    urllib.request.urlopen(url, timeout=10.0)
                assert failed.value.code == 503
                assert "has not answered for" in failed.value.read().decode()
            gate.opened.set()
            monkeypatch.setattr(kept_readings, "_WAIT_S", 60.0)
            with urllib.request.urlopen(url) as reply:
                assert reply.status == 200
        finally:
            gate.opened.set()
            server.shutdown()


def test_a_client_that_sends_nothing_does_not_keep_its_connection(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one kept a thread of the server until it ended."""
    monkeypatch.setattr(metrics, "_IDLE_S", 0.1)
    with ThreadingHTTPServer(("127.0.0.1", 0), metrics._handler(open_store(home))) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=10.0) as client:
                assert client.recv(1) == b""
        finally:
            server.shutdown()
