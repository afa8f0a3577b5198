"""Commands report a store that does not answer, and give it up soon."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.command_limit import command_limit
from holdfast.checkpoint.store.local import LocalStore
from holdfast.cli import main
from holdfast.errors import Denied, RetryLater


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a server that accepts connections and never answers."""
    pytest.importorskip("obstore", reason="needs the extra `remote`")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"s3://bucket/run?endpoint_url=http://127.0.0.1:{server.getsockname()[1]}"


def test_a_silent_store_is_reported_and_given_up(
    silent_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", silent_server, "--patience", "4s"]) == 2
    result = capsys.readouterr().err
    assert "has not answered for 3" in result
    assert "retrying for up to 4" in result
    assert "limit 4" in result
    assert command_limit.limit_s is None, "and no longer than the command"


def test_the_limit_is_20_seconds_by_default() -> None:
    from holdfast.cli import make_parser

    for command in (["ls", "x"], ["verify", "x"], ["rm", "x"], ["show", "x"], ["diff", "x", "y"]):
        assert make_parser().parse_args(command).patience == 20.0
    assert make_parser().parse_args(["ls", "x", "--patience", "5m"]).patience == 300.0
    with pytest.raises(SystemExit):
        make_parser().parse_args(["ls", "x", "--patience", "soon"])


def test_denied_access_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "home")
    store.put("a", b"1")
    for number, kind in ((13, Denied), (1, Denied), (30, Denied), (5, RetryLater), (116, RetryLater)):

        def refuse(*_: object, number: int = number, **__: object) -> None:
            raise OSError(number, "no")

        with monkeypatch.context() as patch:
            patch.setattr("holdfast.checkpoint.store.lookup.open_regular", refuse)
            for act in (lambda: store.get("a"), lambda: store.put("b", b"2")):
                with pytest.raises(kind) as caught:
                    act()
                assert type(caught.value) is kind
    assert open_store(tmp_path / "home").get("a") == b"1"
