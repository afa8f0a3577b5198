"""Buckets mounted as file systems by a real rclone, where this machine has it and FUSE."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.errors import Unsupported
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts import fuse, refusal
from holdfast.jobs.node.mounts.rclone import rclone_environment, settings
from holdfast.jobs.status import Status
from holdfast.store import open_store
from holdfast.store.address import parse_address
from holdfast.testing.servers import Server
from jobs.desk import Desk

HAS_FUSE = bool(shutil.which("rclone") and shutil.which("fusermount3") and os.access("/dev/fuse", os.W_OK))
needs_fuse = pytest.mark.skipif(not HAS_FUSE, reason="needs rclone, fusermount3 and /dev/fuse")


def rclones(path: Path) -> list[processes.Process]:
    """The living rclones that serve a path."""
    return [
        process
        for process in processes.living().values()
        if {b"rclone", os.fsencode(path)} <= set(words(process.pid))
    ]


def words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.mark.slow
@needs_fuse
def test_a_bucket_is_a_file_system_and_gone_when_the_job_is(desk: Desk, s3: Server) -> None:
    url = s3.home("fuse-plain")
    store = open_store(url)
    store.put("in/x", b"seen")
    job = desk.submit(
        "cat b/in/x; head -c 7000000 /dev/zero > b/out; echo closed; until [ -e go ]; do sleep 0.02; done",
        head=f'file_mounts: {{b: {{source: "{url}", mode: MOUNT}}}}',
    )
    desk.wait_until_said(job, "closed")
    path = desk.files(job).copies / "0"
    assert store.size("out") == 7_000_000, "a file that is closed is in the bucket"
    (rclone,) = rclones(path)
    assert b"testsecret" not in b"".join(words(rclone.pid))
    (desk.files(job).workdir(0) / "go").touch()
    assert desk.wait(job).status is Status.SUCCEEDED, desk.tell(job)
    assert "seen" in desk.log(job)
    assert fuse.mounted_below(desk.state) == []
    assert rclones(path) == []
    assert store.get("in/x") == b"seen"


@pytest.mark.slow
@needs_fuse
@pytest.mark.parametrize("what", ["rclone", "porter", "node", "all"])
def test_no_kill_leaves_a_stale_mount(desk: Desk, s3: Server, what: str) -> None:
    url = s3.home(f"fuse-{what}")
    open_store(url).put("x", b"seen")
    job = desk.submit(
        "echo begun $HOLDFAST_ATTEMPT; until [ -e go ] && cat b/x; do sleep 0.05; done",
        head=f'file_mounts: {{b: {{source: "{url}", mode: MOUNT}}}}',
    )
    desk.wait_until_said(job, "begun 1")
    path = desk.files(job).copies / "0"
    if what == "rclone":
        processes.end(rclones(path))
    elif what == "porter":
        processes.end(desk.roles(job, "porter"))
    elif what == "node":
        desk.kill_node(job, 0)
    else:
        processes.end(
            [
                *rclones(path),
                *(one for role in ("controller", "porter", "warden") for one in desk.roles(job, role)),
            ]
        )
        desk.engine.jobs()
    (desk.files(job).workdir(0) / "go").touch()
    ended = desk.wait(job)
    assert ended.status is Status.SUCCEEDED, desk.tell(job)
    assert "seen" in desk.log(job)
    assert ended.recoveries == (what in ("node", "all"))
    assert fuse.mounted_below(desk.state) == []
    assert rclones(path) == []


def test_what_is_lacking_for_a_mounted_bucket_is_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(desk.folder))
    monkeypatch.setattr(refusal, "_FUSE", desk.folder / "fuse")
    with pytest.raises(Unsupported, match=r"rclone.*fusermount3.*fuse.*MOUNT_CACHED"):
        desk.submit("true", head="file_mounts: {b: {source: 's3://bucket/x', mode: MOUNT}}")
    assert desk.engine.jobs() == []


def test_rclone_is_told_of_a_store_by_variables() -> None:
    address = parse_address("s3://b/p?endpoint_url=http://h:1&region=eu&profile=me")
    found = settings(address, {"AWS_ACCESS_KEY_ID": "k"})
    assert found["RCLONE_CONFIG_HOLDFAST_TYPE"] == "s3"
    assert found["RCLONE_CONFIG_HOLDFAST_ENDPOINT"] == "http://h:1"
    assert (found["RCLONE_CONFIG_HOLDFAST_ENV_AUTH"], found["RCLONE_CONFIG_HOLDFAST_PROFILE"]) == (
        "true",
        "me",
    )
    public = settings(parse_address("s3://b?anonymous=yes"), {})
    assert public["RCLONE_CONFIG_HOLDFAST_ENV_AUTH"] == "false"
    azure = settings(parse_address("az://c?account=a"), {"AZURE_STORAGE_ACCOUNT_KEY": "key"})
    assert (azure["RCLONE_CONFIG_HOLDFAST_ACCOUNT"], azure["RCLONE_CONFIG_HOLDFAST_KEY"]) == ("a", "key")
    google = settings(parse_address("gs://b"), {"GOOGLE_APPLICATION_CREDENTIALS": "/k.json"})
    assert google["RCLONE_CONFIG_HOLDFAST_SERVICE_ACCOUNT_FILE"] == "/k.json"
    bundle = rclone_environment(address, {"AWS_CA_BUNDLE": "/ca"})
    assert bundle["RCLONE_CA_CERT"] == "/ca"
    assert "AWS_CA_BUNDLE" not in bundle
