"""Notifications of local jobs, received by real commands and a real HTTP server, with killed processes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast import jobs
from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs import notifications
from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.status import JobStatus
from holdfast.system.linux import locks
from jobs.harness import JobHarness
from jobs.harness import holders as holders_of
from jobs.notifications.receiver import SECRET, Receiver

WAITS = "echo attempt $HOLDFAST_ATTEMPT is up; until [ -e go ]; do sleep 0.02; done"


def launch(harness: JobHarness, run: str, *targets: str, on: list[str] | None = None, head: str = "") -> Job:
    task = harness.folder / "task.yaml"
    task.write_text(f"name: t\n{head}\nrun: |\n  {run}\n")
    return jobs.launch(task, notify=targets, notify_on=on)


def recorder(folder: Path) -> tuple[str, Path]:
    """Return a command that appends what it receives to a file, and the file."""
    out = folder / "received"
    return f"printf '%s ' \"$HOLDFAST_JOB_STATUS\" >> {shlex.quote(str(out))}", out


def wait_for_end(harness: JobHarness, job: Job) -> Job:
    """Wait until a job has ended, and its notifications were sent."""
    ended = harness.wait(job)
    files = harness.files(job)
    harness.wait_for(job, lambda: not files.notify_plan.exists(), "the last notification")
    return ended


def holders(harness: JobHarness, job: Job) -> list[str]:
    """Return the files below a job's folder that contain the secret."""
    return holders_of(harness.files(job).path, SECRET)


def test_a_command_receives_the_facts(harness: JobHarness, tmp_path: Path) -> None:
    (tmp_path / "hook").write_text(f'#!/bin/sh\nenv > "{tmp_path}/env"; cat > "{tmp_path}/in"\n')
    (tmp_path / "hook").chmod(0o755)
    job = launch(harness, "exit 7", str(tmp_path / "hook"), on=["failed"])
    assert wait_for_end(harness, job).status is JobStatus.FAILED
    lines = (tmp_path / "env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    facts = json.loads((tmp_path / "in").read_text())
    assert variables["HOLDFAST_JOB"] == str(job.id) == str(facts["job"])
    assert variables["HOLDFAST_JOB_NAME"] == "t" == facts["name"]
    assert variables["HOLDFAST_JOB_STATUS"] == "FAILED" == facts["status"]
    assert variables["HOLDFAST_JOB_EXIT_STATUS"] == "7" == str(facts["exit_status"])
    assert variables["HOLDFAST_ATTEMPT"] == "1"
    assert facts["reason"] == variables["HOLDFAST_JOB_REASON"] != ""
    assert facts["text"] == variables["HOLDFAST_JOB_TEXT"]
    assert "\n" not in facts["text"]
    assert [one.error for one in jobs.describe(job.id).notifications] == [""]


def test_a_webhook_receives_each_chosen_status_once(harness: JobHarness, receiver: Receiver) -> None:
    once = "[ $HOLDFAST_ATTEMPT = 2 ] || exit 75"
    job = launch(harness, once, receiver.url, on=["ended,recovering,running"])
    assert wait_for_end(harness, job).status is JobStatus.SUCCEEDED
    assert receiver.statuses == ["RUNNING", "RECOVERING", "RUNNING", "SUCCEEDED"]
    assert [body["attempt"] for body in receiver.bodies] == [1, 1, 2, 2]
    assert all(body["text"].startswith(f"job {job.id} (t) on ") for body in receiver.bodies)
    assert set(receiver.paths) == {f"/hooks/{SECRET}?token={SECRET}"}
    assert not holders(harness, job)


def test_a_job_that_is_not_notified_of_removes_its_targets_too(harness: JobHarness, receiver: Receiver):
    job = launch(harness, "true", receiver.url, on=["failed"])
    wait_for_end(harness, job)
    assert receiver.bodies == []
    assert not holders(harness, job)


def test_the_url_is_private_while_the_job_runs(
    harness: JobHarness, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_NOTIFY", receiver.url)
    task = harness.folder / "task.yaml"
    task.write_text(f"run: |\n  env; {WAITS}\n")
    receiver.gate.clear()
    job = jobs.launch(task, notify_on=["running", "ended"])
    monkeypatch.delenv("HOLDFAST_NOTIFY")
    harness.wait_for_output(job, "attempt 1 is up")
    harness.wait_for(job, lambda: receiver.bodies, "the request")
    assert holders(harness, job) == ["notify.json"]
    assert harness.files(job).notify_plan.stat().st_mode & 0o077 == 0
    for one in processes.snapshot().values():
        with contextlib.suppress(OSError):
            shown = Path(f"/proc/{one.pid}/cmdline").read_bytes()
            assert one.pid == os.getpid() or SECRET.encode() not in shown
    for role in ("controller", "agent"):
        for one in harness.roles(job, role):
            assert SECRET.encode() not in Path(f"/proc/{one.pid}/environ").read_bytes()
    assert SECRET not in str(jobs.describe(job.id))
    receiver.gate.set()
    harness.let_go(job)
    wait_for_end(harness, job)
    assert receiver.statuses == ["RUNNING", "SUCCEEDED"]
    assert not holders(harness, job)


def test_a_webhook_that_does_not_answer_does_not_delay_the_job(harness: JobHarness, receiver: Receiver):
    """Neither its end, nor that of a job after it in a pipeline, nor its removal."""
    receiver.gate.clear()
    job = launch(harness, "true", receiver.url, on=["running", "ended"])
    assert harness.wait(job).status is JobStatus.SUCCEEDED
    harness.wait_for(job, lambda: not locks.is_held(harness.files(job).lock), "the end of the controller")
    assert receiver.statuses in ([], ["RUNNING"]), "the first request has no answer yet"
    jobs.forget(job.id)
    assert not harness.files(job).path.exists()


def test_a_target_that_hangs_delays_no_other(harness: JobHarness, receiver: Receiver, tmp_path: Path) -> None:
    """Neither the same status nor later ones, although its own request has no answer yet."""
    command, out = recorder(tmp_path)
    other = Receiver()
    receiver.gate.clear()
    with other.running():
        targets = (receiver.url, other.url, command)
        job = launch(harness, WAITS, *targets, on=["running,ended"])
        harness.wait_for(job, lambda: receiver.bodies, "the request that hangs")
        harness.wait_for(job, lambda: other.statuses == ["RUNNING"] and out.exists(), "the other targets")
        harness.finish(job)
        harness.wait_for(job, lambda: other.statuses == ["RUNNING", "SUCCEEDED"], "the end at the webhook")
        harness.wait_for(job, lambda: out.read_text() == "RUNNING SUCCEEDED ", "the end at the command")
        assert receiver.statuses == ["RUNNING"]
        assert {one.target for one in jobs.describe(job.id).notifications} <= {"webhook 2", "command 3"}
        receiver.gate.set()
        wait_for_end(harness, job)
    assert receiver.statuses == ["RUNNING", "SUCCEEDED"]
    assert not holders(harness, job)


def test_the_end_of_the_commands_does_not_end_a_request(harness: JobHarness, receiver: Receiver) -> None:
    """The controller kills what is left of an attempt, and its own notifier is not."""
    receiver.gate.clear()
    job = launch(harness, WAITS, receiver.url, on=["running", "ended"])
    harness.wait_for(job, lambda: receiver.bodies, "the request")
    harness.finish(job)
    receiver.gate.set()
    wait_for_end(harness, job)
    assert receiver.statuses == ["RUNNING", "SUCCEEDED"]


def test_failures_are_in_the_log_and_the_description(harness: JobHarness, receiver: Receiver) -> None:
    receiver.answers = [404]
    redirecting = Receiver()
    redirecting.answers = [307]
    with redirecting.running():
        targets = (receiver.url, "exit 3", redirecting.url, f"kill -9 $$ # {SECRET}")
        job = launch(harness, "true", *targets)
        wait_for_end(harness, job)
    assert jobs.describe(job.id).job.status is JobStatus.SUCCEEDED
    found = {one.target: one.error for one in jobs.describe(job.id).notifications}
    assert found == {
        "webhook 1": "the server answered with status 404",
        "command 2": "exit status 3",
        "webhook 3": "the server answered with status 307",
        "command 4": "killed by signal 9",
    }
    assert (len(receiver.bodies), len(redirecting.bodies)) == (1, 1), "neither repeated nor redirected"
    log = harness.files(job).controller_log.read_text()
    for target, error in found.items():
        assert f"the notification SUCCEEDED was not sent to {target}: {error}" in log
    assert not holders(harness, job)


def test_a_server_that_fails_is_asked_again(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_FIRST_PAUSE_S", 0.0)
    receiver.answers = [503, 429]
    plan = notifications.NotificationPlan(1, "n", "local", "id", (receiver.url,), frozenset())
    assert notifications._send(plan, receiver.url, {"status": "x"}) == ("", 3)
    receiver.answers = [500] * 9
    failed = ("the server answered with status 500", 4)
    assert notifications._send(plan, receiver.url, {"status": "x"}) == failed
    assert len(receiver.bodies) == 7


def test_messages_of_failures_have_neither_url_nor_host(receiver: Receiver) -> None:
    url = receiver.url.replace("http://", "https://")
    for bad in (url, f"http://{SECRET}.invalid/", "http://127.0.0.1:1/"):
        error, may_pass = notifications.post(bad, b"{}")
        assert error
        assert may_pass
        assert not [text for text in (SECRET, "127.0.0.1", "localhost") if text in error]


def test_https_and_the_proxy_of_the_users_environment_are_used(
    harness: JobHarness, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate = tmp_path / "certificate.pem"
    words = ["req", "-x509", "-nodes", "-days", "9", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(certificate)]
    subprocess.run(["openssl", *words, *names, *files], check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + (tmp_path / "key.pem").read_text())
    secure = Receiver(certificate)
    with secure.running(), monkeypatch.context() as patch:
        error, _ = notifications.post(secure.url, b"{}")
        assert error == "TLS failed (SSLCertVerificationError)", "its certificate is not trusted yet"
        patch.setenv("SSL_CERT_FILE", str(certificate))
        patch.setenv("no_proxy", "localhost")
        patch.setenv("http_proxy", receiver.url.partition("/hooks")[0])
        job = launch(harness, "true", secure.url, "http://hooks.invalid/x")
        patch.undo()
        wait_for_end(harness, job)
    assert secure.statuses == ["SUCCEEDED"]
    assert receiver.statuses == ["SUCCEEDED"]
    assert receiver.paths == ["http://hooks.invalid/x"]


def test_a_server_that_never_ends_its_answer_is_given_up(receiver: Receiver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notifications, "_TOTAL_S", 0.3)
    receiver.gate.clear()
    assert notifications.post(receiver.url, b'{"status": "x"}') == ("the server did not answer in time", True)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_status_is_sent_although_the_controller_is_killed_before(
    harness: JobHarness, receiver: Receiver, number: int
) -> None:
    """The kill is after the status was recorded: STARTING, RUNNING or the end."""
    on = ["starting,running,ended"]
    job = harness.submit_and_kill(
        f"jobs.recorded:{number}", lambda: launch(harness, "true", receiver.url, on=on)
    )
    wait_for_end(harness, job)
    assert receiver.statuses == ["STARTING", "RUNNING", "SUCCEEDED"]


def test_a_killed_notifier_is_replaced_and_sends_again(
    harness: JobHarness, receiver: Receiver, tmp_path: Path
) -> None:
    """The webhook has the message, and nothing recorded that: it is sent twice rather than never."""
    command, out = recorder(tmp_path)
    targets = (command, receiver.url)
    receiver.gate.clear()

    def start() -> Job:
        started = launch(harness, WAITS, *targets, on=["running,ended"])
        harness.wait_for(started, lambda: jobs.describe(started.id).notifications, "the command's result")
        receiver.gate.set()
        return started

    job = harness.submit_and_kill("jobs.notified:2", start)
    harness.let_go(job)
    wait_for_end(harness, job)
    assert out.read_text() == "RUNNING SUCCEEDED "
    assert receiver.statuses == ["RUNNING", "RUNNING", "SUCCEEDED"]


def test_a_killed_job_recovers_and_a_new_controller_notifies(harness: JobHarness, tmp_path: Path) -> None:
    command, out = recorder(tmp_path)
    job = launch(harness, WAITS, command, on=["running,recovering,ended"])
    harness.wait_running(job, "attempt 1 is up")
    harness.kill_all(job)
    harness.engine.jobs()
    harness.wait_for_output(job, "attempt 2 is up")
    harness.let_go(job)
    wait_for_end(harness, job)
    assert out.read_text() == "RUNNING RECOVERING RUNNING SUCCEEDED "


def test_a_cancelled_job_that_waits_is_notified_of(
    harness: JobHarness, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpu = "resources: {accelerators: A100:1}"
    running = launch(harness, WAITS, receiver.url, head=gpu)
    waiting = launch(harness, WAITS, receiver.url, head=gpu)
    jobs.cancel(waiting.id)
    wait_for_end(harness, waiting)
    assert [(body["job"], body["status"]) for body in receiver.bodies] == [(waiting.id, "CANCELLED")]
    harness.wait_for_output(running, "is up")
    harness.let_go(running)
    wait_for_end(harness, running)


def test_a_task_file_cannot_name_a_target(harness: JobHarness, receiver: Receiver) -> None:
    task = harness.folder / "task.yaml"
    task.write_text(f"envs: {{HOLDFAST_NOTIFY: '{receiver.url}'}}\nrun: 'true'\n")
    job = jobs.launch(task)
    harness.wait(job)
    assert not harness.files(job).notify_plan.exists()
    task.write_text(f"notify: '{receiver.url}'\nrun: 'true'\n")
    with pytest.raises(InvalidInput, match="notify"):
        jobs.launch(task)
    assert receiver.bodies == []


def test_engines_without_a_controller_refuse(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    task = harness.folder / "task.yaml"
    task.write_text("run: 'true'\n")
    for engine in ("sky", "k8s", "kubeflow"):
        with pytest.raises(Unsupported, match="do not send notifications"):
            jobs.launch(task, on=engine, notify=["true"])


def test_a_notification_has_the_number_of_failed_saves(harness: JobHarness, tmp_path: Path) -> None:
    """Two ranks have reported the same one."""
    out = tmp_path / "received"
    reports = " ".join(
        f"echo '{json.dumps({'attempt': attempt, 'failed_save': step})}' >> $HOLDFAST_PROGRESS;"
        for attempt, step in ((1, 5), (1, 5), (2, 5))
    )
    wait_for_end(harness, launch(harness, reports, f"printenv HOLDFAST_JOB_TEXT > {shlex.quote(str(out))}"))
    assert "is SUCCEEDED; 2 saves failed" in out.read_text()
