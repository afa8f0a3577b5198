"""The Python environment of a job: `pip install` stays in it, and what the user has installed is visible."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from holdfast.jobs.engine import Job
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness, started_harness, write_program
from jobs.wheels import contents, make_parent, write_package, write_wheel
from small_disk import small_disk

SYSTEM = Path("/usr/bin/python3")
UV = shutil.which("uv")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of wheels: `own` 1.0, and `shared` 1.0 and 2.0."""
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "own")
    for version in ("1.0", "2.0"):
        write_wheel(folder, "shared", version)
    return folder


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """Return the programs of an environment that has pip and `shared` 1.0."""
    folder = tmp_path_factory.mktemp("parent") / "env"
    programs = make_parent(folder, wheels / "shared-1.0-py3-none-any.whl")
    write_program(programs / "hello", "echo hello")
    return programs


@pytest.fixture
def shell(parent: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the variables of a shell in which the parent environment is active, and pip has the wheels."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "PYTHON", "CONDA"))]:
        monkeypatch.delenv(name)
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("VIRTUAL_ENV", str(parent.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(wheels))
    return monkeypatch


@pytest.fixture
def active(harness: JobHarness, shell: pytest.MonkeyPatch, parent: Path) -> JobHarness:
    """Return a harness for jobs that are launched in the parent environment."""
    shell.setenv("PATH", f"{parent}:/usr/bin:/bin")
    return harness


def succeed(harness: JobHarness, run: str, **options: str) -> tuple[Job, str]:
    """Run a job that must succeed, and return it with its output."""
    job = harness.succeed(harness.submit(f"set -e\n{run}", **options))
    return job, harness.log(job)


def venv(harness: JobHarness, job: Job, rank: int = 0) -> Path:
    return harness.files(job).venv(rank)


# -- what is installed where -----------------------------------------------------------------------------


INSTALLATIONS = [
    "pip install own",
    pytest.param("pip3 install own", marks=pytest.mark.slow),
    pytest.param("python -m pip install own", marks=pytest.mark.slow),
    pytest.param(f"pip{sys.version_info[0]}.{sys.version_info[1]} install own", marks=pytest.mark.slow),
    "echo own > requirements.txt; python3 -m pip install -r requirements.txt",
]


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_a_package_of_setup_is_in_all_attempts_of_this_job_only(
    active: JobHarness, parent: Path, installation: str
) -> None:
    before = contents(parent.parent)
    run = """
    python -c 'import own, shared; print(own.VERSION, shared.VERSION)'
    own-show
    [ $HOLDFAST_ATTEMPT = 2 ] || exit 75
    """
    job, log = succeed(active, run, setup=installation)
    assert active.engine.job(job.id).attempt == 2
    assert log.count("1.0 1.0\n") == 2
    assert log.count(f"own 1.0 by {venv(active, job)}/bin/python") == 2
    _, log = succeed(active, "! python -c 'import own' && ! command -v own-show")
    assert "No module named 'own'" in log
    assert contents(parent.parent) == before
    active.engine.forget(job.id)
    assert not active.files(job).path.exists()


@pytest.mark.slow
def test_packages_of_the_parent_are_satisfied_upgraded_in_the_job_and_never_removed(
    active: JobHarness, parent: Path
) -> None:
    before = contents(parent.parent)
    job, log = succeed(
        active,
        """
        shared-show
        pip uninstall -y shared
        pip uninstall -y shared
        hash -r
        shared-show
        """,
        setup="pip install shared\npython -c 'import shared; print(shared.VERSION)'\npip install -U shared",
    )
    assert "Requirement already satisfied: shared" in log
    own = venv(active, job) / "bin" / "python"
    assert [line for line in log.splitlines() if line.startswith(("1.0", "shared "))] == [
        "1.0",
        f"shared 2.0 by {own}",
        f"shared 1.0 by {parent}/python",  # the job has removed its own program of this name
    ]
    assert f"outside environment {venv(active, job)}" in log
    assert contents(parent.parent) == before


@pytest.mark.slow
def test_a_package_in_development_is_installed_and_built_without_the_parents_packages(
    active: JobHarness, parent: Path
) -> None:
    write_package(active.folder / "source")
    show = "cd /; python -c 'import edited; print(edited.VERSION, edited.__file__)'"
    job, log = succeed(active, show, setup="pip install -e .", head=f"workdir: {active.folder / 'source'}")
    assert f"edited {active.files(job).workdir(0)}/edited.py" in log


def test_an_editable_package_of_the_job_comes_before_one_of_the_parent(active: JobHarness) -> None:
    """Setuptools installs a finder, which Python asks after the folders of packages."""
    (active.folder / "source").mkdir()
    finder = """
    import sys
    from importlib.util import spec_from_file_location
    class Finder:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return spec_from_file_location(name, "edited/shared.py") if name == "shared" else None
    sys.meta_path.append(Finder)
    """
    setup = f"""
    packages=$(echo $VIRTUAL_ENV/lib/python3*/site-packages)
    cat > $packages/__editable___shared_finder.py <<'END'
    {finder.replace(chr(10), chr(10) + "    ")}
    END
    sed -i 's/^    //' $packages/__editable___shared_finder.py
    echo 'import __editable___shared_finder' > $packages/__editable__.shared.pth
    mkdir edited nearer
    echo "VERSION = 'edited'" > edited/shared.py
    echo "VERSION = 'nearer'" > nearer/shared.py
    """
    show = "python -c 'import shared; print(shared.VERSION)'"
    _, log = succeed(active, f"{show}\nPYTHONPATH=nearer {show}", setup=setup)
    assert log.endswith("edited\nnearer\n")


# -- programs --------------------------------------------------------------------------------------------


STATES = [
    pytest.param("state", id="plain", marks=pytest.mark.slow),
    pytest.param("my own 'state'", id="spaces", marks=pytest.mark.slow),
    pytest.param("/".join(["a-very-long-name-of-a-folder"] * 9), id="long"),
]


@pytest.mark.parametrize("state", STATES)
def test_scripts_of_both_environments_run_the_python_of_the_job(
    shell: pytest.MonkeyPatch, parent: Path, tmp_path: Path, state: str
) -> None:
    shell.setenv("PATH", f"{parent}:/usr/bin:/bin")
    with started_harness(tmp_path, tmp_path / state) as harness:
        shell.setenv("PATH", f"{parent}:/usr/bin:/bin")
        run = """
        own-show
        shared-show
        python "$(command -v shared-show)"
        hello
        for name in python python3; do $name -c 'import own, sys; print("called", sys.executable)'; done
        """
        job, log = succeed(harness, run, setup="pip install own")
        programs = venv(harness, job) / "bin"
        assert log.count(f"own 1.0 by {programs}/python") == 1
        assert log.count(f"shared 1.0 by {programs}/python") == 2
        assert "hello\n" in log
        assert f"called {programs}/python\ncalled {programs}/python3\n" in log


def test_processes_of_holdfast_keep_their_python(active: JobHarness) -> None:
    job = active.submit("echo there; python -c 'import signal; signal.pause()'")
    active.wait_for_output(job, "there")
    started = [*active.roles(job, "controller"), *active.roles(job, "agent")]
    assert len(started) == 3  # with the guardian of the controller
    for process in started:
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert words[0] == os.fsencode(sys.executable), words
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"/venv" not in environment.replace(os.fsencode(sys.prefix), b"")
    active.cancel(job)


@pytest.mark.slow
def test_training_imports_holdfast_and_a_launch_in_a_job_runs_outside_of_it(harness: JobHarness) -> None:
    python = shlex.quote(str(Path(sys.executable).parent / "python3"))
    code = """
    import sys, holdfast, torch
    from holdfast.jobs.node.virtual_environment import own_python
    print("imported", holdfast.__file__, sys.prefix)
    print("outside", own_python())
    """
    (harness.folder / "source").mkdir()
    (harness.folder / "source" / "train.py").write_text(textwrap.dedent(code))
    run = f"python train.py; echo expected $({python} -c 'import sys; print(sys.executable)')"
    job, log = succeed(harness, run, head=f"workdir: {harness.folder / 'source'}")
    import holdfast

    assert f"imported {holdfast.__file__} {venv(harness, job)}\n" in log
    lines = dict(line.split(" ", 1) for line in log.splitlines() if line.startswith(("outside", "expected")))
    assert lines["outside"] == lines["expected"]


# -- the user's settings ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_of_the_shell_do_not_lead_pip_elsewhere(
    active: JobHarness, shell: pytest.MonkeyPatch
) -> None:
    extra = active.folder / "extra"
    extra.mkdir()
    (extra / "extra.py").write_text("")
    for name in ("PIP_USER", "PIP_REQUIRE_VIRTUALENV", "PYTHONSAFEPATH"):
        shell.setenv(name, "1")
    shell.setenv("PIP_TARGET", str(active.folder / "target"))
    shell.setenv("PYTHONPATH", str(extra))
    run = "python -c 'import own, shared, extra; print(own.__file__)'"
    _, log = succeed(active, run, setup="pip install own")
    assert "/venv/lib/python3" in log
    assert not (active.folder / "target").exists()
    assert not [*(active.folder / "HOME").rglob("own*")]


def test_settings_of_the_task_are_its_own(active: JobHarness) -> None:
    target = str(active.folder / "target")
    job, log = succeed(
        active, "shared-show", setup="pip install own", PIP_TARGET=target, PYTHONHOME="/nowhere"
    )
    assert f"shared 1.0 by {venv(active, job)}/bin/python" in log, "no other home of Python applies to it"
    assert (active.folder / "target" / "own.py").exists()
    assert not [*venv(active, job).rglob("own.py")]


def test_a_job_may_have_no_environment_of_its_own(
    active: JobHarness, shell: pytest.MonkeyPatch, parent: Path
) -> None:
    show = "python -c 'import sys; print(\"in\", sys.prefix)'; echo active $VIRTUAL_ENV"
    job, log = succeed(active, show, HOLDFAST_VENV="none")
    assert f"in {parent.parent}\nactive {parent.parent}\n" in log
    assert not venv(active, job).exists()
    shell.setenv("HOLDFAST_VENV", "none")
    assert f"in {parent.parent}\nactive {parent.parent}\n" in succeed(active, show)[1]
    job, log = succeed(active, show, HOLDFAST_VENV="maybe")
    assert "HOLDFAST_VENV is 'maybe', expected job or none" in log
    assert f"in {venv(active, job)}\n" in log


@pytest.mark.slow
def test_an_environment_that_the_task_makes_and_activates_is_used(active: JobHarness) -> None:
    setup = """
    python -m venv --without-pip .venv
    source .venv/bin/activate
    pip --python .venv/bin/python install own
    """
    run = """
    first=$VIRTUAL_ENV
    python -c 'import own; print("own of the job")' 2>/dev/null || true
    source .venv/bin/activate
    python -c 'import own, sys; print("in", sys.prefix)'
    deactivate
    source $first/bin/activate
    python -c 'import sys; print("in", sys.prefix)'
    """
    job, log = succeed(active, run, setup=setup)
    workdir = active.files(job).workdir(0)
    assert "own of the job" not in log
    assert f"in {workdir}/.venv\nin {venv(active, job)}\n" in log


def test_an_environment_of_conda_wins(active: JobHarness, shell: pytest.MonkeyPatch, parent: Path) -> None:
    programs = active.folder / "conda" / "envs" / "gpt" / "bin"
    hook = active.folder / "conda" / "etc" / "profile.d" / "conda.sh"
    hook.parent.mkdir(parents=True)
    hook.write_text(f'conda() {{ export PATH="{programs}:$PATH"; }}\n')
    conda = active.folder / "conda" / "bin" / "conda"
    for path in (conda, programs / "pip"):
        write_program(path, "echo conda: $*")
    shell.setenv("CONDA_EXE", str(conda))
    job, log = succeed(active, "echo active $VIRTUAL_ENV", setup="conda activate gpt\npip install own")
    assert f"conda: install own\nactive {parent.parent}\n" in log
    assert not venv(active, job).exists()


# -- nodes and interruptions -----------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_that_install_at_the_same_time_have_their_own(active: JobHarness) -> None:
    setup = """
    touch $MEETING/$SKYPILOT_SETUP_NODE_RANK
    until [ -e $MEETING/0 ] && [ -e $MEETING/1 ]; do sleep 0.01; done
    pip install own
    """
    job, _ = succeed(active, "own-show", setup=setup, head="num_nodes: 2", MEETING=str(active.folder))
    for rank in range(2):
        assert f"own 1.0 by {venv(active, job, rank)}/bin/python" in active.log(job, rank)


def test_a_setup_that_was_interrupted_begins_with_a_new_environment(active: JobHarness) -> None:
    setup = """
    python -c 'import own' && echo found what the lost setup has installed
    pip install own
    if mkdir $MEETING/there; then echo waiting; sleep 600; fi
    """
    job = active.submit("own-show", setup=setup, MEETING=str(active.folder))
    active.wait_for_output(job, "waiting")
    active.kill_node(job, 0)
    active.succeed(job)
    assert "found" not in active.log(job)
    assert active.log(job).count("Successfully installed own") == 2
    assert "own 1.0 by" in active.log(job)


def test_a_half_made_environment_is_made_again(active: JobHarness) -> None:
    job = active.succeed(active.submit_and_kill("jobs.venv", lambda: active.submit("shared-show")))
    assert f"shared 1.0 by {venv(active, job)}/bin/python" in active.log(job)
    assert [path.name for path in venv(active, job).parent.glob("*venv*")] == ["venv"]


@pytest.mark.slow
def test_a_full_disk_ends_the_job_before_its_commands(
    shell: pytest.MonkeyPatch, wheels: Path, tmp_path: Path
) -> None:
    programs = make_parent(tmp_path / "large", wheels / "shared-1.0-py3-none-any.whl")
    for number in range(400):
        shutil.copy(programs / "shared-show", programs / f"show-{number}")
    with small_disk(tmp_path, "1m") as disk, started_harness(tmp_path, disk / "state") as harness:
        shell.setenv("PATH", f"{programs}:/usr/bin:/bin")
        ended = harness.run("echo ran", ends=JobStatus.FAILED_SETUP)
        log = harness.log(ended)
        assert "the job cannot start: its virtual environment cannot be made: " in log
        assert "No space left on device" in log
        assert "ran" not in log
        assert not [*venv(harness, ended).parent.glob(".venv*")]


# -- other parents ---------------------------------------------------------------------------------------


def test_a_python_that_does_not_work_is_named_and_the_job_runs(
    active: JobHarness, shell: pytest.MonkeyPatch
) -> None:
    broken = active.folder / "broken"
    write_program(broken / "python3", "echo version 3.9 is not installed >&2\nexit 3")
    shell.setenv("PATH", f"{broken}:/usr/bin:/bin")
    _, log = succeed(active, "echo ran")
    assert f"{broken}/python3 does not run: it exits with 3: version 3.9 is not installed" in log
    assert log.endswith("ran\n")


def test_a_job_needs_no_python_at_all(active: JobHarness, shell: pytest.MonkeyPatch) -> None:
    only = active.folder / "only"
    only.mkdir()
    (only / "bash").symlink_to(shutil.which("bash") or "/bin/bash")
    shell.setenv("PATH", str(only))
    job, log = succeed(active, "echo ran")
    assert log.count("\n") == 2
    assert not venv(active, job).exists()


@pytest.mark.slow
def test_a_shim_is_asked_in_the_workdir(active: JobHarness, shell: pytest.MonkeyPatch, parent: Path) -> None:
    """Pyenv and similar programs choose a Python by the current directory."""
    shims = active.folder / "shims"
    write_program(shims / "python3", 'read -r chosen < .python-path\nexec "$chosen" "$@"')
    (active.folder / "source").mkdir()
    (active.folder / "source" / ".python-path").write_text(f"{parent}/python3\n")
    shell.setenv("PATH", f"{shims}:/usr/bin:/bin")
    job, log = succeed(
        active, "own-show; shared-show", setup="pip install own", head=f"workdir: {active.folder / 'source'}"
    )
    for name in ("own", "shared"):
        assert f"{name} 1.0 by {venv(active, job)}/bin/python" in log


@pytest.mark.slow
def test_a_parent_without_pip_gets_it_in_the_job(
    active: JobHarness, shell: pytest.MonkeyPatch, wheels: Path, tmp_path: Path
) -> None:
    programs = make_parent(tmp_path / "bare", wheels / "shared-1.0-py3-none-any.whl", has_pip=False)
    before = contents(programs.parent)
    shell.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for command in ("pip", "python -m pip"):
        _, log = succeed(
            active, "own-show\nshared-show", setup=f"{command} install own\n{command} install shared"
        )
        assert "Successfully installed own" in log
        assert "already satisfied: shared" in log
    assert contents(programs.parent) == before


@pytest.mark.slow
@pytest.mark.skipif(
    not list(Path("/usr/lib").glob("python3*/EXTERNALLY-MANAGED")) or not SYSTEM.exists(),
    reason="this system's Python is not marked as externally managed",
)
def test_pip_works_with_an_externally_managed_python(active: JobHarness, shell: pytest.MonkeyPatch) -> None:
    shell.setenv("PATH", "/usr/bin:/bin")
    shell.delenv("VIRTUAL_ENV")
    _, log = succeed(active, "true; pip install own || echo refused", HOLDFAST_VENV="none")
    assert "refused" in log
    job, log = succeed(active, "own-show", setup="pip install own")
    assert f"own 1.0 by {venv(active, job)}/bin/python" in log


@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_uv_installs_into_the_environment_of_the_job(
    active: JobHarness, shell: pytest.MonkeyPatch, parent: Path
) -> None:
    before = contents(parent.parent)
    shell.setenv("PATH", f"{parent}:{Path(str(UV)).parent}:/usr/bin:/bin")
    shell.setenv("UV_SYSTEM_PYTHON", "1")
    setup = "uv pip install own 'shared==1.0'\nuv pip install -U shared"
    job, log = succeed(active, "own-show\nshared-show", setup=setup)
    assert f"own 1.0 by {venv(active, job)}/bin/python" in log
    assert f"shared 2.0 by {venv(active, job)}/bin/python" in log
    assert contents(parent.parent) == before


# -- a job in a job --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_environment_of_a_job_can_be_the_parent_of_another(
    active: JobHarness, shell: pytest.MonkeyPatch
) -> None:
    outer, _ = succeed(active, "true", setup="pip install own")
    shell.setenv("PATH", f"{venv(active, outer)}/bin:{os.environ['PATH']}")
    inner, log = succeed(active, "own-show; shared-show; pip install own")
    for name in ("own", "shared"):
        assert f"{name} 1.0 by {venv(active, inner)}/bin/python" in log
    assert "already satisfied: own" in log
