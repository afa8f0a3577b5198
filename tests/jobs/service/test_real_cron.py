"""The real crontab and cron daemon, in a mount namespace with another spool and boot id."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.jobs.status import JobStatus
from holdfast.system.entry import command
from jobs.harness import LIMIT_S, JobHarness

WAITS = "echo attempt $HOLDFAST_ATTEMPT is up; until [ -e go ]; do sleep 0.02; done"
_IN_NAMESPACE = """
set -e
holdfast() { "$PYTHON" "$ENTRY" holdfast.cli service "$@"; }
mount -t tmpfs -o mode=1730 tmpfs /var/spool/cron/crontabs
chgrp crontab /var/spool/cron/crontabs
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/cron.d
mount --bind /dev/null /etc/crontab
mount --bind "$FOLDER/boot_id" /proc/sys/kernel/random/boot_id
holdfast status --json > "$FOLDER/status" || true  # 1, as no unit is installed
"$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["cron_line"])' < "$FOLDER/status" | crontab -
cron -f & daemon=$!
trap 'kill $daemon' EXIT
for i in $(seq 3000); do grep -q RECOVERING "$HOLDFAST_STATE/service.log" && break; sleep 0.1; done
"""


def missing() -> str:
    """Return why the real programs cannot be tried here, or an empty text."""
    absent = [name for name in ("cron", "crontab", "unshare") if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} is not installed"
    if os.getuid() != 0:
        return "only root can have a mount namespace with another spool of cron"
    works = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    return "" if works else "mount namespaces are forbidden here"


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "cron is installed")
def test_cron_continues_a_job_after_a_restart(
    harness: JobHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "50% it's \\%"
    monkeypatch.setenv("HOLDFAST_STATE", str(state))
    harness = JobHarness(tmp_path)
    job = harness.submit(WAITS)
    harness.wait_running(job, "attempt 1 is up")
    harness.kill_all(job)
    (tmp_path / "boot_id").write_text("another-boot\n")
    python, entry, *_ = command("holdfast.cli")
    environment = {**os.environ, "PYTHON": python, "ENTRY": entry, "FOLDER": str(tmp_path)}
    words = ["unshare", "-m", "bash", "-c", _IN_NAMESPACE]
    subprocess.run(words, env=environment, timeout=LIMIT_S, check=True)
    harness.wait_for_output(job, "attempt 2 is up")
    assert harness.finish(job).status is JobStatus.SUCCEEDED
    harness.leave()
