"""Buckets mounted as file systems by a real rclone, if this machine has rclone and FUSE."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.address import parse_address
from holdfast.errors import Unsupported
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts import mount_records
from holdfast.jobs.node.mounts.mount_records import mounted_below
from holdfast.jobs.node.mounts.mounter import rclone_environment, settings
from jobs.harness import JobHarness, command_line, needs_namespaces
from servers import Server

HAS_FUSE = bool(shutil.which("rclone") and shutil.which("fusermount3") and os.access("/dev/fuse", os.W_OK))
needs_fuse = pytest.mark.skipif(not HAS_FUSE, reason="needs rclone, fusermount3 and /dev/fuse")


@pytest.fixture
def trusted(s3: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return a server that the user trusts, as task files name it."""
    monkeypatch.setenv("HOLDFAST_TRUST_ENDPOINTS", s3.endpoint_url)
    return s3


def rclones(path: Path) -> list[processes.Process]:
    """Return the running rclones that serve a path."""
    return [
        process
        for process in processes.snapshot().values()
        if {b"rclone", os.fsencode(path)} <= set(command_line(process.pid))
    ]


@pytest.mark.slow
@needs_fuse
def test_a_bucket_is_mounted_and_is_unmounted_when_the_job_ends(harness: JobHarness, trusted: Server) -> None:
    url = trusted.home("fuse-plain")
    store = open_store(url)
    store.put("in/x", b"seen")
    job = harness.submit(
        "cat b/in/x; head -c 7000000 /dev/zero > b/out; echo closed; until [ -e go ]; do sleep 0.02; done",
        head=f'file_mounts: {{b: {{source: "{url}", mode: MOUNT}}}}',
    )
    harness.wait_for_output(job, "closed")
    path = harness.files(job).copies / "0"
    assert store.size("out") == 7_000_000, "a file that is closed is in the bucket"
    (rclone,) = rclones(path)
    assert b"testsecret" not in b"".join(command_line(rclone.pid))
    harness.let_go(job)
    harness.succeed(job)
    assert "seen" in harness.log(job)
    assert mounted_below(harness.state) == []
    assert rclones(path) == []
    assert store.get("in/x") == b"seen"


@pytest.mark.slow
@needs_fuse
@needs_namespaces
def test_a_bucket_is_mounted_where_only_the_job_sees_it(harness: JobHarness, trusted: Server) -> None:
    url, target = trusted.home("fuse-private"), f"/holdfast-test-{os.getpid()}"
    open_store(url).put("in/x", b"seen")
    job = harness.run(
        f"cat {target}/in/x; echo result > {target}/out",
        head=f'file_mounts: {{{target}: {{source: "{url}", mode: MOUNT}}}}',
    )
    assert "seen" in harness.log(job)
    assert open_store(url).get("out") == b"result\n"
    assert not Path(target).exists()


@pytest.mark.slow
@needs_fuse
@pytest.mark.parametrize("what", ["rclone", "mounter", "node", "all"])
def test_no_kill_leaves_a_stale_mount(harness: JobHarness, trusted: Server, what: str) -> None:
    url = trusted.home(f"fuse-{what}")
    open_store(url).put("x", b"seen")
    job = harness.submit(
        "echo begun $HOLDFAST_ATTEMPT; until [ -e go ] && cat b/x; do sleep 0.05; done",
        head=f'file_mounts: {{b: {{source: "{url}", mode: MOUNT}}}}',
    )
    harness.wait_for_output(job, "begun 1")
    path = harness.files(job).copies / "0"
    if what == "rclone":
        processes.kill(rclones(path))
    elif what == "mounter":
        processes.kill(harness.roles(job, "mounter"))
    elif what == "node":
        harness.kill_node(job, 0)
    else:
        roles = [one for role in ("controller", "mounter", "agent") for one in harness.roles(job, role)]
        processes.kill([*rclones(path), *roles])
        harness.engine.jobs()
    harness.let_go(job)
    ended = harness.succeed(job)
    assert "seen" in harness.log(job)
    assert ended.recoveries == (what in ("node", "all"))
    assert mounted_below(harness.state) == []
    assert rclones(path) == []


def test_missing_programs_for_a_mounted_bucket_are_reported(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(harness.folder))
    monkeypatch.setattr(mount_records, "_DEVICE", harness.folder / "fuse")
    with pytest.raises(Unsupported, match=r"rclone.*fusermount3.*fuse.*MOUNT_CACHED"):
        harness.submit("true", head="file_mounts: {b: {source: 's3://bucket/x', mode: MOUNT}}")
    assert harness.engine.jobs() == []


def test_rclone_receives_a_store_s_settings_as_variables() -> None:
    address = parse_address("s3://b/p?endpoint_url=http://h:1&region=eu&profile=me")
    found = settings(address, {"AWS_ACCESS_KEY_ID": "k"})
    expected = {"TYPE": "s3", "ENDPOINT": "http://h:1", "ENV_AUTH": "true", "PROFILE": "me"}
    assert {name: found[f"RCLONE_CONFIG_HOLDFAST_{name}"] for name in expected} == expected
    public = settings(parse_address("s3://b?anonymous=yes"), {})
    assert public["RCLONE_CONFIG_HOLDFAST_ENV_AUTH"] == "false"
    azure = settings(parse_address("az://c?account=a"), {"AZURE_STORAGE_ACCOUNT_KEY": "key"})
    assert (azure["RCLONE_CONFIG_HOLDFAST_ACCOUNT"], azure["RCLONE_CONFIG_HOLDFAST_KEY"]) == ("a", "key")
    google = settings(parse_address("gs://b"), {"GOOGLE_APPLICATION_CREDENTIALS": "/k.json"})
    assert google["RCLONE_CONFIG_HOLDFAST_SERVICE_ACCOUNT_FILE"] == "/k.json"
    bundle = rclone_environment(address, {"AWS_CA_BUNDLE": "/ca"})
    assert bundle["RCLONE_CA_CERT"] == "/ca"
    assert "AWS_CA_BUNDLE" not in bundle
