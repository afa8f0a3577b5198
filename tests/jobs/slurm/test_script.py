"""Input of sbatch for a task: options, the script's text, and rejected tasks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput, NotFound, Unsupported
from holdfast.jobs.slurm.engine import SlurmEngine, batch_script, grace_s, wanted_options
from holdfast.jobs.slurm.job_files import JobFiles
from holdfast.jobs.task.model import Task, TaskFile, memory_mib
from holdfast.jobs.task.parser import parse_tasks
from jobs.harness import write_program

FULL = """
name: gpt
num_nodes: 2
resources:
  infra: slurm/alpha/spot
  cpus: 8+
  memory: 64GB
  accelerators: A100:8
  use_spot: true
  disk_tier: best
config:
  slurm:
    sbatch_options: {account: team, time: "12:00:00", signal: USR1@300, exclusive: }
  kubernetes: {provision_timeout: 10}
run: python train.py
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --comment=task-id
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --chdir=/shared/jobs/3
#SBATCH --output=/shared/jobs/3/slurm.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --cpus-per-task=8
#SBATCH --mem=65536M
#SBATCH --gres=gpu:a100:8
#SBATCH --partition=spot
#SBATCH --signal=USR1@300
#SBATCH --account=team
#SBATCH --time=12:00:00
#SBATCH --exclusive

# Slurm may signal this shell only. A shell runs a trap only while it waits, never while a child
# runs in its foreground.
told= controller=
trap 'told=USR1; kill -USR1 "$controller" 2>/dev/null' USR1
trap 'told=TERM; kill -TERM "$controller" 2>/dev/null' TERM
/opt/venv/bin/python /opt/holdfast/entry.py holdfast.jobs.slurm controller /shared/jobs/3 &
controller=$!
if [ -n "$told" ]; then kill "-$told" "$controller"; fi
while kill -0 "$controller" 2>/dev/null; do wait "$controller"; done
wait "$controller"
status=$?
# The controller was killed, and could not requeue the job. A cancelled job stays cancelled.
if [ "$status" -gt 128 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def task(text: str) -> Task:
    return parse_tasks(text if "run:" in text else f"{text}\nrun: x\n", "task.yaml").only()


def test_the_script_contains_all_options() -> None:
    asked = task(FULL)
    folder = "/shared/jobs/3"
    words = ("/opt/venv/bin/python", "/opt/holdfast/entry.py", "holdfast.jobs.slurm", "controller", folder)
    assert batch_script(asked, "task-id", JobFiles(Path(folder)), words) == SCRIPT
    assert grace_s(wanted_options(asked)) == 300.0


def test_names_with_spaces_are_quoted() -> None:
    words = ("/a b/python", "controller", "/c d")
    script = batch_script(task('name: "my job\'s"'), "id", JobFiles(Path("/c d")), words)
    assert """#SBATCH --job-name='my job'"'"'s'""" in script
    assert "#SBATCH --chdir='/c d'" in script
    assert "'/a b/python' controller '/c d' &" in script


def fake_controller(folder: Path, body: str, state: str = "RUNNING") -> Path:
    """Batch script whose controller is a shell script, with a Slurm that records its calls."""
    write_program(folder / "python", body)
    write_program(folder / "scontrol", f'echo "$@" >> {folder}/told')
    write_program(folder / "squeue", f"echo {state}")
    text = batch_script(task("name: n"), "id", JobFiles(folder), (str(folder / "python"),))
    (folder / "sbatch.sh").write_text(text)
    return folder / "sbatch.sh"


def run_script(script: Path) -> subprocess.Popen[str]:
    folder = script.parent
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    return subprocess.Popen(["bash", str(script)], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_the_batch_shell_forwards_its_signals(tmp_path: Path, name: str) -> None:
    """Twice: the shell waits again after the first, and exits with its controller."""
    body = f"trap 'n=$((n + 1)); echo told $n; [ $n = 2 ] && exit 5' {name}\necho ready\n"
    with run_script(fake_controller(tmp_path, body + "while true; do sleep 0.02; done")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in (1, 2):
            subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
            assert process.stdout.readline() == f"told {number}\n"
        assert process.wait() == 5
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("body", "state", "status", "asked"),
    [
        ("kill -KILL $$", "RUNNING", 137, ["requeue 7"]),
        ("kill -TERM $$", "COMPLETING", 143, []),
        ("exit 0", "RUNNING", 0, []),
        ("exit 1", "RUNNING", 1, []),
    ],
)
def test_the_batch_shell_requeues_only_after_a_killed_controller_of_a_running_job(
    tmp_path: Path, body: str, state: str, status: int, asked: list[str]
) -> None:
    with run_script(fake_controller(tmp_path, body, state)) as process:
        assert process.wait() == status
    told = tmp_path / "told"
    assert (told.read_text().splitlines() if told.exists() else []) == asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, 16384) for text in (16, "16", "16+", "16GB")),
        *(("1.5T", 1572864), ("512 MiB", 512), ("4x", None), (None, None)),
    ],
)
def test_memory_is_parsed_as_skypilot_does(text: object, expected: int | None) -> None:
    assert memory_mib(text) == expected


def test_without_resources_slurm_is_only_asked_for_a_signal_in_time() -> None:
    assert wanted_options(task("name: x")) == {"signal": "USR1@60"}
    assert grace_s({}) == 60.0


def test_partitions_are_found_in_skypilot_s_keys() -> None:
    only_cpus = "config: {slurm: {cpu_partition: small}}"
    assert wanted_options(task(only_cpus))["partition"] == "small"
    assert "partition" not in wanted_options(task(f"{only_cpus}\nresources: {{accelerators: A100}}"))
    assert wanted_options(task("resources: {infra: slurm/c/big}"))["partition"] == "big"
    assert "partition" not in wanted_options(task("resources: {infra: slurm/c}"))


def test_options_of_the_task_override_defaults() -> None:
    options = "{gres: 'gpu:8', mem_per_gpu: 8G, time: 1, exclusive: true, partition: false}"
    resources = "resources: {accelerators: A100:8, infra: slurm/c/p}"
    text = f"{resources}\nconfig: {{slurm: {{sbatch_options: {options}}}}}"
    found = wanted_options(task(text))
    assert (found["gres"], found["mem-per-gpu"]) == ("gpu:8", "8G")
    assert (found["time"], found["exclusive"], "partition" in found) == ("1", None, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{requeue: }", "Holdfast sets --requeue itself"),
        ("{signal: TERM@5}", "expected USR1@SECONDS"),
        ('{comment: "x"}', "Holdfast sets --comment itself"),
        ("{array: 0-3}", "--array is not possible here: launch the file once for each value: `for i"),
        ("{nodes: 2}", "Holdfast sets --nodes itself: the number of nodes is `num_nodes`"),
        ("{export: ALL}", "--export is not possible here: use `envs`"),
        ('{account: "x\\n#SBATCH --uid=0"}', "expected an option of sbatch"),
        ('{"no such": 1}', "expected an option of sbatch"),
        ("[a]", "expected a map of options"),
    ],
)
def test_options_that_would_break_a_job_are_rejected(options: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        wanted_options(task(f"name: x\nconfig: {{slurm: {{sbatch_options: {options}}}}}"))
    assert "task.yaml:2:" in str(caught.value)


def test_keys_with_another_meaning_are_reported(tmp_path: Path) -> None:
    engine = SlurmEngine(tmp_path)
    told = {found_key.key: found_key for found_key in engine.unsupported_keys(task(FULL))}
    asked = [f"resources.{key}" for key in ("infra", "cpus", "accelerators", "use_spot", "disk_tier")]
    assert list(told) == [*asked, "config.kubernetes"]
    assert "partition 'spot'" in told["resources.infra"].what
    assert "--gres=gpu:a100:8" in told["resources.accelerators"].what
    assert told["resources.use_spot"].line == 9
    text = "resources: {accelerators: {A100: 1, H100: 1}, memory: 2x}"
    several = {one.key: one for one in engine.unsupported_keys(task(text))}
    assert "only the first, A100" in several["resources.accelerators"].what
    assert "not passed on" in several["resources.memory"].what


def test_mounts_that_other_nodes_would_not_see_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    engine = SlurmEngine()
    for mount, error in (
        (f"{tmp_path}/data: {{name: b, mode: MOUNT}}", Unsupported),
        (f"{tmp_path}/data: {{name: b, mode: MOUNT_CACHED}}", Unsupported),
        ("data: /nowhere/at/all", NotFound),
    ):
        with pytest.raises(error):
            engine.check(task(f"file_mounts: {{{mount}}}"))
    for mount in (
        "{name: b, mode: MOUNT}",
        "{name: b, mode: MOUNT_CACHED}",
        "{source: 's3://b', mode: MOUNT}",
    ):
        for target in ("data", "~/holdfast-test-data"):
            engine.check(task(f"file_mounts: {{{target}: {mount}}}"))


def test_without_slurm_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="sbatch is not on the PATH"):
        SlurmEngine().submit_file(TaskFile("x", (task("name: x"),)))
    assert SlurmEngine().jobs() == []
