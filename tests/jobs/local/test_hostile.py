"""Untrusted task files and folders: inspecting them runs no program and sends nothing."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.adapters.nebula import lightning
from holdfast.adapters.nebula.tag_index import PartitionMarker
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import InvalidInput
from holdfast.jobs.node.workdir import ignored_paths
from holdfast.system.entry import command
from jobs.harness import write_program

NAMED, GOOGLE = (f"{scheme}://b/p?endpoint_url=https://h:9" for scheme in ("s3", "gs"))
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "not-for-strangers",
    "AWS_SESSION_TOKEN": "session-token",
    "AZURE_STORAGE_ACCOUNT_NAME": "me",
    "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=secret",
}


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """Attacker's server, which waits for a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def _endpoint(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def _was_called(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _git(folder: Path, *words: str) -> None:
    who = {f"GIT_{role}_{what}": "x@y" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, env=os.environ | who)


def launch(folder: Path, source: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Launch a task that mounts a place, with keys in the environment."""
    (folder / "task.yaml").write_text(f"file_mounts:\n  data: {source}\nrun: 'true'\n")
    words = command("holdfast.cli", "launch", str(folder / "task.yaml"), *options)
    variables = {**os.environ, **KEYS, "HOLDFAST_STATE": str(folder / "state"), **env}
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("dry", [True, False])
def test_credentials_are_not_sent_to_an_endpoint_that_only_the_task_file_names(
    tmp_path: Path, stranger: socket.socket, scheme: str, dry: bool
) -> None:
    """Even `launch --dry-run` once sent a bearer token to an address of the file's choice."""
    url = f"{scheme}://bucket/data?endpoint_url={_endpoint(stranger)}"
    done = launch(tmp_path, url, *(["--dry-run"] if dry else []))
    assert not _was_called(stranger)
    assert done.returncode != 0
    assert "would send your keys to the endpoint" in done.stderr
    assert "HOLDFAST_TRUST_ENDPOINTS" in done.stderr


def test_a_dry_run_sends_nothing_even_to_a_trusted_endpoint(tmp_path: Path, stranger: socket.socket) -> None:
    done = launch(tmp_path, "s3://bucket/data", "--dry-run", AWS_ENDPOINT_URL=_endpoint(stranger))
    assert done.returncode == 0, done.stderr
    assert not _was_called(stranger)


def test_credentials_are_not_sent_to_an_endpoint_that_only_a_marker_names(
    tmp_path: Path, stranger: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrusted file `last.ckpt` may refer to a checkpoint in any place."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    home = f"s3://bucket/run?endpoint_url={_endpoint(stranger)}"
    PartitionMarker(home, "global_step1", "checkpoint").write(tmp_path / "last.ckpt")
    marker = PartitionMarker.read(tmp_path / "last.ckpt")
    assert marker is not None
    with pytest.raises(InvalidInput, match="would send your keys to the endpoint"):
        lightning._load(marker, str(tmp_path / "last.ckpt"), None)
    assert not _was_called(stranger)


@pytest.mark.parametrize(
    ("url", "environment", "own", "is_fine"),
    [
        (NAMED, {}, "", False),
        ("s3a://b/p?endpoint_url=https://h:9", {}, "", False),
        ("s3://b/p?endpoint_url=https://h:9&anonymous=no", {}, "", False),
        ("s3://b/p?endpoint_url=https://h:9&anonymous=yes", {}, "", True),
        (NAMED, {"AWS_ENDPOINT_URL": "https://h:9/"}, "", True),
        ("s3://b/p?endpoint_url=http://h:9", {"AWS_ENDPOINT_URL": "https://h:9"}, "", False),
        (NAMED, {"AWS_ENDPOINT_URL": "https://h"}, "", False),
        ("s3://b/p?endpoint_url=https://h", {"AWS_ENDPOINT_URL_S3": "https://h:443"}, "", True),
        (GOOGLE, {"AWS_ENDPOINT_URL": "https://h:9"}, "", False),
        (GOOGLE, {"HOLDFAST_TRUST_ENDPOINTS": "https://a, https://h:9"}, "", True),
        ("s3://b/p?endpoint_url=https://h.evil", {"HOLDFAST_TRUST_ENDPOINTS": "https://h"}, "", False),
        ("s3://b/p", {}, "", True),
        ("/a/folder", {}, "", True),
        # The endpoint of a place that the user has named is trusted.
        (NAMED, {}, "s3://other?endpoint_url=https://h:9", True),
        (NAMED, {}, "s3://other?endpoint_url=https://evil", False),
        (NAMED, {}, "s3://other?endpoint_url=https://h:9&anonymous=yes", False),
        *((NAMED, {}, one, False) for one in ("s3://other", "/a/folder")),
    ],
)
@pytest.mark.usefixtures("no_endpoints")
def test_an_endpoint_must_be_trusted_by_the_user(
    url: str, environment: dict[str, str], own: str, is_fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if is_fine:
        check_endpoint(url, "It", own=own)
    else:
        with pytest.raises(InvalidInput, match="would send your keys to the endpoint"):
            check_endpoint(url, "It", own=own)


def test_listing_ignored_files_runs_no_program_of_the_folder(tmp_path: Path) -> None:
    """An untrusted `.git/config` can name programs that git runs when it reads files."""
    work, module = tmp_path / "work", tmp_path / "module"
    program = tmp_path / "program"
    write_program(program, f"touch {tmp_path}/ran")
    for folder in (module, work):
        folder.mkdir()
        (folder / "kept").write_text("x")
        _git(folder, "init", "--quiet")
        _git(folder, "add", ".")
        _git(folder, "commit", "--quiet", "-m", "1")
    _git(work, "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(module), "deep/sub")
    for folder in (work, work / "deep" / "sub"):
        (folder / ".gitignore").write_text("skip\n")
        (folder / "skip").write_text("x")
        for name in ("core.fsmonitor", "core.sshCommand", "core.pager", "core.askPass", "diff.external"):
            _git(folder, "config", name, str(program))
        hooks = Path(work, ".git") if folder == work else Path(work, ".git", "modules", "deep", "sub")
        write_program(hooks / "hooks" / "post-index-change", f"touch {tmp_path}/ran")
    (tmp_path / "ran").unlink(missing_ok=True)
    assert ignored_paths(work) == {"skip", "deep/sub/skip"}
    assert not (tmp_path / "ran").exists()
