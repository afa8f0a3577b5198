"""The BERT example: a job that is preempted twice ends like an uninterrupted one, with one curve."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from examples.running import EXAMPLES, ROOT, environment
from holdfast.checkpoint.store import open_store
from holdfast.cli import main
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import bucket_folder, state_dir
from holdfast.jobs.status import JobStatus
from holdfast.watch.report.curves import Curve
from holdfast.watch.report.summary import read_summary
from jobs.harness import JobHarness
from nursery import shared

pytest.importorskip("transformers")

FOLDER = EXAMPLES / "bert_qa"
STEPS = 90
OPTIONS = f"--max_steps {STEPS} --save_steps 25 --num_eval 30 --per_device_train_batch_size 4"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """One thread, no network, and nothing outside the test's folder."""
    values = {
        "PYTHONPATH": environment()["PYTHONPATH"],
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HOLDFAST_STATE": str(tmp_path / "state"),
        "HOME": str(tmp_path),
        "HOLDFAST_PREEMPTION": "none",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **values}


def curves(home: Path) -> dict[str, Curve]:
    """Return the curves of a run by name."""
    return {one.name: one for one in read_summary(open_store(str(home))).curves}


def train(home: Path, *options: str) -> dict[str, float]:
    """Train with the script alone; what it says at its end."""
    done = shared().run([str(FOLDER / "train.py"), "--output_dir", str(home), *options], timeout_s=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def squad_file(path: Path, texts: dict[str, list[tuple[str, str, str]]]) -> None:
    """A file of SQuAD's form: for each text id, question and answer."""
    paragraphs = []
    for context, asked in texts.items():
        qas = [
            {"id": id, "question": text, "answers": [{"text": found, "answer_start": context.index(found)}]}
            for id, text, found in asked
        ]
        paragraphs.append({"context": context, "qas": qas})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "kelp", "paragraphs": paragraphs}]}))


@pytest.mark.usefixtures("env")
def test_it_trains_on_files_of_squad_s_form_with_texts_longer_than_a_window(tmp_path: Path) -> None:
    grows, grips, is_long = "Kelp grows in cold water. ", "Its holdfast grips the rock. ", "It may be long. "
    asked = [("a", "What grips the rock?", "Its holdfast"), ("b", "Where does kelp grow?", "in cold water")]
    texts = {
        grows * 30 + grips + is_long * 16: asked,
        "An otter eats urchins.": [("c", "What does an otter eat?", "urchins")],
    }
    folder = tmp_path / "squad"
    folder.mkdir()
    squad_file(folder / "train-v1.1.json", texts)
    squad_file(folder / "dev-v1.1.json", texts)
    result = train(
        tmp_path / "home",
        *("--dataset_name", str(folder), "--max_steps", "30", "--per_device_train_batch_size", "8"),
        *("--max_seq_length", "64", "--doc_stride", "16"),
    )
    assert (result["step"], result["questions"]) == (30, 3)
    assert result["f1"] > 0
    loss = curves(tmp_path / "home")["loss"].counted
    assert [point.step for point in loss] == list(range(1, 31))
    assert loss[-1].value < loss[0].value


@pytest.mark.slow
@pytest.mark.usefixtures("env")
def test_a_job_that_is_preempted_twice_has_the_curve_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    train(tmp_path / "quiet", *OPTIONS.split())
    assert main(["launch", "examples/bert_qa/task.yaml", "--env", f"OPTIONS={OPTIONS}"]) == 0
    desk = JobHarness(tmp_path)
    try:
        (job,) = desk.engine.jobs()
        home = bucket_folder(state_dir(), "bert-qa") / job.task_id
        for attempt, step in ((1, 20), (2, 50)):
            wait_for_step(desk, job, home, step)
            assert main(["preempt", str(job.id)]) == 0
            has_ended = lambda then=attempt: desk.engine.job(job.id).attempt > then  # noqa: E731
            desk.wait_for(job, has_ended, "the next attempt")
        ended = desk.wait(job)
        assert (ended.status, ended.recoveries) == (JobStatus.SUCCEEDED, 2), desk.describe(job)
    finally:
        desk.leave()
    truth, told = curves(tmp_path / "quiet"), curves(home)
    for name in ("loss", "lr"):
        assert [point.step for point in told[name].counted] == list(range(1, STEPS + 1))
        assert [point.value for point in told[name].counted] == [point.value for point in truth[name].counted]
        assert told[name].lost == (), "a notice costs no step"
    assert {point.attempt for point in told["loss"].counted} == {1, 2, 3}
    assert told["f1"].counted[-1].value == truth["f1"].counted[-1].value
    assert main(["report", str(home), "-o", str(tmp_path / "report.html")]) == 0
    assert "loss, step by step" in (tmp_path / "report.html").read_text()


def wait_for_step(desk: JobHarness, job: Job, home: Path, step: int) -> None:
    """Wait until the training has told of a step."""

    def is_there() -> bool:
        assert not desk.engine.job(job.id).status.is_final, desk.describe(job)
        known = curves(home) if home.exists() else {}
        return "loss" in known and known["loss"].counted[-1].step >= step

    desk.wait_for(job, is_there, f"step {step}")
