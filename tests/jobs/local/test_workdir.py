"""Workdirs of jobs: copies without ignored files, and clones of repositories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput, NotFound, RetryLater
from holdfast.jobs.folder import job_folder
from holdfast.jobs.node import workdir
from holdfast.jobs.node.workdir import copy_tree, ignored_paths, left_out_of_workdir
from jobs.harness import JobHarness

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *settings, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def put(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with two commits on main, a tag at the first, and a branch."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    put(folder, file="one")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "1")
    git(folder, "tag", "v1")
    put(folder, file="two")
    git(folder, "commit", "--quiet", "-am", "2")
    git(folder, "checkout", "--quiet", "-b", "topic/x")
    put(folder, file="three")
    git(folder, "commit", "--quiet", "-am", "3")
    git(folder, "checkout", "--quiet", "main")
    return folder


# -- ignored ---------------------------------------------------------------------------------------------


def test_what_git_ignores_is_not_copied(tmp_path: Path) -> None:
    work = tmp_path / "work"
    put(work, a="", data__big="", deep__x__log="", deep__kept="", tracked__log="", sub__inner="")
    (work / ".gitignore").write_text("data/\nlog\n")
    (work / "deep" / ".gitignore").write_text("x\n")
    git(work, "init", "--quiet")
    git(work, "add", "-f", "tracked/log")
    (work / ".git" / "info" / "exclude").write_text("inner\n")
    copy_tree(work, tmp_path / "copy", left_out_of_workdir(work, job_folder(tmp_path / "state", 1)))
    found = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*")}
    assert {"a", "deep/kept", "tracked/log", ".gitignore"} <= found, "what is tracked is copied all the same"
    assert not {"data", "deep/x", "sub/inner"} & found
    assert ignored_paths(work / "deep") == {"x"}, "a workdir below the top of a repository"


def test_a_skyignore_replaces_git_s_rules(tmp_path: Path) -> None:
    put(tmp_path, a__log="", b="", logs__x="", deep__logs__y="", c="")
    (tmp_path / ".gitignore").write_text("c\n")
    (tmp_path / ".skyignore").write_text("# comment\n\n/logs\n*/log\nb\n")
    git(tmp_path, "init", "--quiet")
    assert ignored_paths(tmp_path) == {"logs", "a/log", "b"}


def test_a_folder_outside_any_repository_and_one_that_is_ignored_as_a_whole_are_copied(
    tmp_path: Path,
) -> None:
    put(tmp_path, runs__a="")
    (tmp_path / ".gitignore").write_text("runs\na\n")
    assert ignored_paths(tmp_path) == frozenset()
    git(tmp_path, "init", "--quiet")
    assert ignored_paths(tmp_path / "runs") == frozenset()


@pytest.mark.parametrize("up", ["..", "."])
def test_the_state_of_jobs_is_not_copied_into_itself(harness: JobHarness, up: str) -> None:
    """A workdir and a mount around it, such as the user's whole home directory, are copied without it."""
    (harness.state / "jobs").mkdir(exist_ok=True)
    source = (harness.state / up).resolve()
    (source / "mine").write_text("mine ")
    head = f"workdir: {source}\nfile_mounts:\n  {harness.folder}/there: {source}"
    for _ in range(2):
        job = harness.run(f"cat mine {harness.folder}/there/mine", head=head)
        assert "mine mine" in harness.log(job)
        copies = [harness.files(job).workdir(0), harness.files(job).copies / "0"]
        found = [path.name for copy in copies for path in copy.rglob("*")]
        assert found.count("mine") == 2
        assert "environment.json" not in found, "the secrets of another job"


# -- repositories ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ref", "text"), [(None, "two"), ("topic/x", "three"), ("v1", "one"), ("commit", "one")]
)
def test_a_repository_is_cloned_at_its_ref(
    harness: JobHarness, repository: Path, ref: str | None, text: str
) -> None:
    first = git(repository, "rev-parse", "v1")
    ref = first[:10] if ref == "commit" else ref
    at = f", ref: {ref}" if ref else ""
    head = f'workdir: {{url: "file://{repository}"{at}}}\nnum_nodes: 2'
    job = harness.run("echo it is $(cat file)", head=head)
    for node in range(2):
        assert f"it is {text}" in harness.log(job, node)
    commit = git(harness.files(job).workdir(0), "rev-parse", "HEAD")
    assert commit == git(repository, "rev-parse", ref or "main")
    assert f"at commit {commit}" in harness.log(job)


@pytest.mark.parametrize(
    ("workdir", "error", "said"),
    [
        ('{{url: "file://{path}", ref: nowhere}}', NotFound, "no branch, tag or commit 'nowhere'"),
        ('{{url: "file://{path}-not"}}', RetryLater, "Cannot clone"),
        ('{{url: "--upload-pack=x"}}', InvalidInput, "expected a url"),
    ],
)
def test_a_missing_repository_starts_nothing(
    harness: JobHarness, repository: Path, workdir: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        harness.submit("true", head=f"workdir: {workdir.format(path=repository)}")
    assert harness.engine.jobs() == []
    assert not [path for path in harness.state.glob("jobs/*") if path.is_dir()]


def test_a_skyignore_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".skyignore").write_bytes("a\ncafé\n".encode("latin-1"))
    with pytest.raises(InvalidInput, match=r"\.skyignore:2: expected UTF-8.*Save it as UTF-8"):
        ignored_paths(tmp_path)


# -- copies ----------------------------------------------------------------------------------------------


def _hollow(path: Path) -> None:
    """Write a file of 1 GiB with two pages of data."""
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(300 << 20)
        file.write(b"x" * 4096)
        file.seek((1 << 30) - 4096)
        file.write(b"y" * 4096)


@pytest.mark.parametrize("has_copy_file_range", [True, False])
def test_holes_of_a_file_stay_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_copy_file_range: bool
) -> None:
    if not has_copy_file_range:
        monkeypatch.delattr(os, "copy_file_range")
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    _hollow(source / "hollow")
    put(source, small="text", empty="")
    (source / "small").chmod(0o750)
    copy_tree(source, copy, left_out_of_workdir(source, job_folder(tmp_path / "state", 1)))
    status = (copy / "hollow").stat()
    assert status.st_size == 1 << 30
    assert status.st_blocks * 512 < 1 << 20
    with (copy / "hollow").open("rb") as file:
        assert (file.seek(300 << 20), file.read(4097)) == (300 << 20, b"x" * 4096 + b"\0")
        file.seek(-4096, os.SEEK_END)
        assert file.read() == b"y" * 4096
    assert (copy / "small").read_text() == "text"
    assert (copy / "small").stat().st_mode & 0o777 == 0o750
    assert (copy / "empty").read_text() == ""


def test_holes_of_a_mounted_file_stay_holes_too(harness: JobHarness) -> None:
    _hollow(harness.folder / "data.bin")
    job = harness.run("stat data.bin", head=f"file_mounts: {{data.bin: {harness.folder / 'data.bin'}}}")
    (copy,) = harness.files(job).copies.iterdir()
    assert (copy.stat().st_size, copy.stat().st_blocks * 512 < 1 << 20) == (1 << 30, True)


def test_a_workdir_has_a_limit_and_its_largest_file_is_shown(
    harness: JobHarness, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = harness.folder / "work"
    put(work, data__big="x" * (1 << 20), small="x")
    head = f"workdir: {work}\nnum_nodes: 2\nenvs: {{HOLDFAST_COPY_LIMIT: %s}}"
    with pytest.raises(InvalidInput, match=r"1.0 MB in 2 files, copied 2 times.*data/big.*\.skyignore"):
        harness.submit("true", head=head % "1500KiB")
    assert harness.engine.jobs() == []
    monkeypatch.setattr(workdir, "_SHOWN_BYTES", 1 << 20)
    job = harness.submit("true", head=head % "none")
    shown = capsys.readouterr().err
    assert "1.0 MB in 2 files, copied 2 times" in shown
    assert "data/big" in shown
    harness.wait(job)
    (work / ".skyignore").write_text("data\n")
    harness.run("true", head=head % "1MiB")


_AS_NOBODY = """
import os, sys
from pathlib import Path
from holdfast.errors import Denied
from holdfast.jobs.folder import job_folder
from holdfast.jobs.node.workdir import create_workdir
from holdfast.jobs.task.parser import parse_tasks, Overrides
os.setgid(65534), os.setuid(65534)
task = parse_tasks(f"workdir: {sys.argv[1]}\\nrun: x", "task.yaml", Overrides()).only()
try:
    create_workdir(task, job_folder(Path("/nowhere"), 1))
except Denied as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_that_cannot_be_read_are_named_before_anything_is_copied(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # that of the test is closed to other users
    try:
        put(folder, a="", deep__b="", deep__c="")
        folder.chmod(0o755)
        for name in ("a", "deep/b"):
            (folder / name).chmod(0)
        words = [sys.executable, "-c", _AS_NOBODY, str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder)
    assert f"cannot read {folder}/a, {folder}/deep/b. Change the permissions." in done.stdout, done.stderr
    assert "('" not in done.stdout


def test_what_could_not_be_copied_is_named_in_words(tmp_path: Path) -> None:
    put(tmp_path / "source", a="", b="")
    (tmp_path / "to").mkdir()

    def vanishing(folder: str, _: list[str]) -> list[str]:
        (Path(folder) / "a").unlink()
        return []

    with pytest.raises(OSError, match=r"could not copy .*/source/a: .*No such file"):
        copy_tree(tmp_path / "source", tmp_path / "to" / "copy", vanishing)


def test_pipes_and_sockets_are_left_out_of_a_copy(tmp_path: Path) -> None:
    put(tmp_path / "source", a="text")
    os.mkfifo(tmp_path / "source" / "pipe")
    copy_tree(tmp_path / "source", tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["a"]
