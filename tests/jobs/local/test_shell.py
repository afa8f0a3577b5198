"""The shell of a job's commands, as SkyPilot's: unbuffered output, ~/sky_workdir and conda."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.errors import Conflict, InvalidInput, Unsupported
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness, write_program

HOOK = """
export CONDA_EXE={base}/bin/conda
__conda_activate() {{
  if [ ! -d "{base}/envs/$1" ]; then echo "EnvironmentNameNotFound: $1" >&2; return 1; fi
  export PATH="{base}/envs/$1/bin:$PATH" CONDA_DEFAULT_ENV="$1"
}}
conda() {{
  case "$1" in
    activate) __conda_activate "$2" ;;
    *) "$CONDA_EXE" "$@" ;;
  esac
}}
"""
"""The parts of conda's own hook on which commands depend."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home without conda."""
    found = tmp_path / "home"
    found.mkdir()
    monkeypatch.setenv("HOME", str(found))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("CONDA_EXE", "CONDA_SHLVL", "CONDA_DEFAULT_ENV", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    return found


def install_conda(base: Path) -> None:
    """Create the files of conda, with an environment `gpt` that has the program `train`."""
    (base / "etc" / "profile.d").mkdir(parents=True)
    (base / "etc" / "profile.d" / "conda.sh").write_text(HOOK.format(base=base))
    write_program(base / "bin" / "conda", "echo conda: $*")
    write_program(base / "envs" / "gpt" / "bin" / "train", "echo trained")


# -- output ----------------------------------------------------------------------------------------------


def test_printed_lines_of_python_are_not_buffered(harness: JobHarness, home: Path) -> None:
    show = "echo unbuffered: ${PYTHONUNBUFFERED:-no}"
    job = harness.run(show, setup=show)
    assert harness.log(job).count("unbuffered: 1") == 2
    assert "unbuffered: no\n" in harness.log(harness.run(show, PYTHONUNBUFFERED=""))


def test_a_line_printed_before_a_kill_is_in_the_log(harness: JobHarness, home: Path) -> None:
    job = harness.submit(f"{sys.executable} -c 'print(\"step 1\"); import signal; signal.pause()'")
    harness.wait_for_output(job, "step 1\n")
    harness.cancel(job)


# -- workdir ---------------------------------------------------------------------------------------------


def test_each_job_and_node_has_its_own_sky_workdir(harness: JobHarness, home: Path) -> None:
    """Two jobs of two nodes write and read at the same time."""
    run = """
    cd /
    cd ~/sky_workdir
    echo $JOB $SKYPILOT_NODE_RANK > "$HOME/sky_workdir/mine"
    until [ -e go ]; do sleep 0.02; done
    echo found $(cat ~/sky_workdir/mine) at $PLACE
    """
    jobs = [harness.submit(run, head="num_nodes: 2", JOB=name, PLACE="~/sky_workdir") for name in ("a", "b")]
    for job in jobs:
        for rank in range(2):
            workdir = harness.files(job).workdir(rank)
            harness.wait_for(job, (workdir / "mine").exists, "a line in the workdir")
    for job in jobs:
        for rank in range(2):
            harness.let_go(job, rank)
    for name, job in zip("ab", jobs, strict=True):
        harness.succeed(job)
        for rank in range(2):
            workdir = harness.files(job).workdir(rank)
            assert f"found {name} {rank} at {workdir}" in harness.log(job, rank)
    assert not list(home.iterdir()), "the home stays as it is"


def test_one_job_at_a_time_has_the_link_that_its_programs_name(harness: JobHarness, home: Path) -> None:
    source = harness.folder / "source"
    source.mkdir()
    (source / "go.sh").write_text("cd ~/sky_workdir && touch there && until [ -e go ]; do sleep 0.02; done\n")
    (source / "task.yaml").write_text("run: cd ~/sky_workdir\n")
    head = f"workdir: {source}"
    first = harness.submit("cd /; bash $OLDPWD/go.sh", head=head)
    there = harness.files(first).workdir(0) / "there"
    harness.wait_for(first, there.exists, "the program in the workdir")
    with pytest.raises(Conflict, match=rf"go\.sh names sky_workdir.* workdir of job {first.id} until"):
        harness.submit("x", head=head)
    assert len(harness.engine.jobs()) == 1
    (there.parent / "go").touch()
    harness.succeed(first)
    harness.wait_for(first, lambda: not list(home.iterdir()), "the end of the link")
    harness.run("true", head=head)


def test_a_link_that_would_be_wrong_is_refused(harness: JobHarness, home: Path) -> None:
    with pytest.raises(Unsupported, match="Each of the 2 nodes has a workdir of its own"):
        harness.submit("ls ~/sky_workdir/../x", head="num_nodes: 2")
    (home / "sky_workdir").mkdir()
    with pytest.raises(Conflict, match="already exists and does not belong to a job"):
        harness.submit("ls ~/sky_workdir/../x")
    assert harness.engine.jobs() == []
    harness.run("cd ~/sky_workdir; touch here")
    assert not list((home / "sky_workdir").iterdir())


def test_a_state_folder_that_needs_quotes_is_refused_for_such_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "my state"))
    harness = JobHarness(tmp_path)
    with pytest.raises(InvalidInput, match="Set HOLDFAST_STATE to a folder"):
        harness.submit("cd ~/sky_workdir")
    harness.run("pwd")
    harness.leave()


# -- conda -----------------------------------------------------------------------------------------------


def test_conda_activate_works_in_commands_and_in_scripts_that_they_run(
    harness: JobHarness, home: Path
) -> None:
    install_conda(home / "miniconda3")
    job = harness.run("set -eu\nconda activate gpt\ntrain\nbash -c 'conda activate gpt; train'")
    assert harness.log(job).count("trained") == 2


def test_conda_is_found_by_its_variable_and_on_the_path(
    harness: JobHarness, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_conda(home / "elsewhere")
    activate = "conda activate gpt && train"
    monkeypatch.setenv("PATH", f"{home}/elsewhere/bin:/usr/bin:/bin")
    harness.run(activate)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CONDA_EXE", f"{home}/elsewhere/bin/conda")
    harness.run(activate)


def test_a_missing_environment_is_left_to_the_commands_as_on_skypilot(
    harness: JobHarness, home: Path
) -> None:
    """Many task files create an environment if it cannot be activated."""
    install_conda(home / "miniconda3")
    run = "conda activate other\nif [ $? -ne 0 ]; then conda create -n other; fi"
    assert "conda: create -n other" in harness.log(harness.run(run))


def test_a_job_without_conda_ends_at_its_activation(harness: JobHarness, home: Path) -> None:
    ended = harness.run("echo begun\nconda activate gpt\necho went on", ends=JobStatus.FAILED)
    assert "failed in run with status 127" in ended.reason
    assert "`conda activate gpt` cannot work" in ended.reason
    assert "begun" in ended.reason
    assert "went on" not in ended.reason
    harness.run("true", setup="conda activate gpt", ends=JobStatus.FAILED_SETUP)


def test_conda_may_be_installed_by_the_job_itself(harness: JobHarness, home: Path) -> None:
    install_conda(home / "prepared")
    hook = home / "prepared" / "etc" / "profile.d" / "conda.sh"
    hook.write_text(hook.read_text().replace("prepared", "miniconda3"))
    setup = "mv ~/prepared ~/miniconda3\nconda activate gpt\ntrain"
    job = harness.run("conda activate gpt && train", setup=setup)
    assert harness.log(job).count("trained") == 2


def test_line_numbers_in_messages_of_bash_are_those_of_the_commands(harness: JobHarness, home: Path) -> None:
    job = harness.run("true\nno-such-program", ends=JobStatus.FAILED)
    assert "line 2: no-such-program: command not found" in harness.log(job)
