"""`holdfast rm` deletes the chosen checkpoints only, and keeps the newest one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast as api
from cli.conftest import Command, flip, save
from faulty_store import FaultyStore
from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.home.commit import refuse
from holdfast.checkpoint.home.inventory import take_inventory
from holdfast.checkpoint.home.listing import WriterId
from holdfast.checkpoint.keeper.committer import was_committed
from holdfast.checkpoint.store import open_store
from holdfast.cli import homes, rm
from holdfast.errors import Corrupt, InvalidInput, RetryLater


def remaining(home: Path) -> set[str]:
    return {path.name for path in home.glob("step-*") if any(path.iterdir())}


def files(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


class Terminal(io.StringIO):
    """Input from a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_step_is_deleted_with_all_its_files(holdfast: Command, home: Path) -> None:
    before = files(home)
    holdfast("rm", home, "--step", 100, "--yes").printed("deleted 1 checkpoint")
    gone = before - files(home)
    assert len(gone) == 5
    assert {name.partition("/")[0] for name in gone} == {"step-00000100"}


def test_a_step_of_one_attempt(holdfast: Command, home: Path) -> None:
    assert holdfast("rm", home, "--step", 300, "--attempt", 1, "--yes").status == 0
    assert (home / names.manifest(300, 2)).exists()
    assert not list((home / "step-00000300").glob("*-a0001*"))


def test_the_newest_is_kept_and_nothing_else_is_touched(holdfast: Command, home: Path) -> None:
    before = files(home)
    for words in (["--step", 300], ["--before", 1000], ["--before", 301, "--superseded"]):
        holdfast("rm", home, *words, "--yes").refused("newest complete", "Nothing was deleted")
    assert files(home) == before


def test_the_newest_good_one_is_kept_if_a_newer_one_is_damaged(holdfast: Command, home: Path) -> None:
    """A damaged newest checkpoint may be deleted, but not the one that a restore would take."""
    flip(home / names.manifest(300, 2))
    assert holdfast("rm", home, "--step", 250, "--yes").status == 2
    assert holdfast("rm", home, "--step", 300, "--attempt", 2, "--yes").status == 0
    assert holdfast("rm", home, "--step", 250, "--yes").status == 2


@pytest.mark.parametrize(
    ("words", "steps"),
    [(["--step", 300, "--force"], (100, 200, 250, 400)), (["--before", 250], (250, 300, 400))],
    ids=["the newest by force", "older steps"],
)
def test_only_the_chosen_steps_are_deleted(
    holdfast: Command, home: Path, words: list[object], steps: tuple[int, ...]
) -> None:
    assert holdfast("rm", home, *words, "--yes").status == 0
    assert remaining(home) == {f"step-00000{step}" for step in steps}


def test_superseded(holdfast: Command, home: Path) -> None:
    found = holdfast("rm", home, "--superseded", "--json", "--yes").json
    assert [(row["step"], row["attempt"]) for row in found["deleted"]] == [(300, 1)]
    assert (home / names.manifest(300, 2)).exists()


def test_files_that_may_still_be_written_are_kept(holdfast: Command, home: Path) -> None:
    result = holdfast("rm", home, "--incomplete", "--yes")
    assert result.status == 0
    assert "nothing to delete" in result.out
    assert "may still be writing" in result.err
    assert holdfast("rm", home, "--step", 400, "--yes").status == 2
    assert "step-00000400" in remaining(home)


def test_incomplete_files_are_deleted_after_their_attempt(holdfast: Command, home: Path) -> None:
    save(home, 350, 1, commit=False)
    assert holdfast("rm", home, "--incomplete", "--yes").status == 0
    assert remaining(home) == {f"step-00000{step}" for step in (100, 200, 250, 300, 400)}
    open_store(home).put(names.DONE, run.document(run.Done("run-one", 2, 300, 0.0)))
    assert holdfast("rm", home, "--incomplete", "--yes").status == 0
    assert "step-00000400" not in remaining(home)


@pytest.mark.parametrize("is_refused_before", [False, True])
def test_a_deleted_incomplete_save_of_a_running_attempt_never_counts_as_a_checkpoint(
    holdfast: Command, home: Path, is_refused_before: bool
) -> None:
    """Another rank, still waiting for its commit, would take it for one that retention has deleted."""
    store, other = open_store(home), WriterId("run-one", 2, 1, 2)
    if is_refused_before:
        refuse(store, other, 400, InvalidInput("rank 0 has no copy", step=400))
    assert holdfast("rm", home, "--incomplete", "--force", "--yes").status == 0
    save(home, 500, 2, base=(1, 200))
    with pytest.raises(InvalidInput, match="no copy" if is_refused_before else "`holdfast rm --force`"):
        was_committed(store, other, 400)
    assert files(home / "step-00000400") == {"refused-a0002.json"}


def test_unfinished_files_of_a_killed_writer_are_deleted(holdfast: Command, home: Path) -> None:
    code = (
        "import sys; from holdfast.checkpoint.store import open_store\n"
        "open_store(sys.argv[1]).put('step-00000100/rank-00009-a0001.safetensors', bytes(5000))"
    )
    env = {**os.environ, "HOLDFAST_KILL_AT": "store.written"}
    killed = subprocess.run([sys.executable, "-c", code, str(home)], env=env, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(files(home / "step-00000100")) == 6
    assert holdfast("rm", home, "--step", 100, "--yes").status == 0
    assert not (home / "step-00000100").exists()


def test_dry_run_deletes_nothing(holdfast: Command, home: Path) -> None:
    before = files(home)
    result = holdfast("rm", home, "--before", 250, "--dry-run")
    assert result.status == 0
    assert [line.split()[0] for line in result.out.splitlines()] == ["STEP", "100", "200"]
    found = holdfast("rm", home, "--before", 250, "--dry-run", "--json").json
    assert (len(found["chosen"]), found["deleted"]) == (2, [])
    assert files(home) == before


@pytest.mark.parametrize(
    ("answer", "is_deleted"), [("y\n", True), ("yes\n", True), ("n\n", False), ("", False)]
)
def test_the_user_is_asked_on_a_terminal(
    holdfast: Command, home: Path, monkeypatch: pytest.MonkeyPatch, answer: str, is_deleted: bool
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    holdfast("rm", home, "--step", 100).printed("delete these checkpoints? [y/N]")
    assert (home / "step-00000100").exists() is not is_deleted


def test_yes_does_not_ask_and_a_choice_is_required(
    holdfast: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast("rm", home, "--yes").refused("Choose what to delete")
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert "[y/N]" not in holdfast("rm", home, "--step", 100, "--yes").out
    assert not (home / "step-00000100").exists()


def test_the_manifest_is_deleted_first(home: Path) -> None:
    """If the store fails at any delete after the first, no manifest is left whose files are missing."""
    for failing in range(1, 6):
        store = FaultyStore(open_store(home))
        store.fail("delete", RetryLater("the disk is gone"), nth=failing)
        found = take_inventory(store, homes.open_home(str(home))[1], None)
        row = next(row for row in found.rows if row.step == 200)
        with pytest.raises(RetryLater):
            rm.delete(store, found, row)
        manifest = (home / names.manifest(200, 1)).exists()
        whole = len(list((home / "step-00000200").iterdir())) == 5
        assert manifest == whole
        save(home, 200, 1)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_without_a_terminal_yes_is_required(holdfast: Command, home: Path, words: list[str]) -> None:
    before = files(home)
    holdfast("rm", home, "--step", 100, *words).refused("Add --yes", "Nothing was deleted")
    assert files(home) == before


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Make the home of a finished run."""
    home = tmp_path / "finished"
    with api.Checkpointer(home, {"x": torch.zeros(4)}, every=1, quiet=True) as ckpt:
        list(ckpt.steps(3))
    return home


@pytest.mark.parametrize("is_in_loop", [False, True])
def test_a_run_whose_checkpoints_were_all_deleted_starts_from_scratch(
    holdfast: Command, finished: Path, is_in_loop: bool
) -> None:
    assert holdfast("rm", finished, "--before", 100, "--force", "--yes").status == 0
    assert not list(finished.glob("step-*/*"))
    with api.Checkpointer(finished, {"x": torch.zeros(4)}, every=1, quiet=True) as ckpt:
        if is_in_loop:
            assert list(ckpt.steps(2)) == [0, 1]
        else:
            assert ckpt.restore() is None
            ckpt.save(1).wait_durable()
    assert api.open(finished).attempt == 2, "the number of an attempt is never used again"


def test_a_loss_after_the_deletion_is_an_error(holdfast: Command, finished: Path) -> None:
    assert holdfast("rm", finished, "--before", 100, "--force", "--yes").status == 0
    with api.Checkpointer(finished, {"x": torch.zeros(4)}, every=1, quiet=True) as ckpt:
        list(ckpt.steps(2))
    for path in list(finished.glob("step-*/*")):
        path.unlink()
    with api.Checkpointer(finished, {"x": torch.zeros(4)}, quiet=True) as ckpt:
        with pytest.raises(Corrupt, match="attempt 2 has had a complete checkpoint") as caught:
            ckpt.restore()
        assert "attempt 1" not in str(caught.value)


@pytest.mark.parametrize("is_record_damaged", [False, True])
def test_neither_a_damaged_record_nor_other_deletions_excuse_a_loss(
    holdfast: Command, finished: Path, is_record_damaged: bool
) -> None:
    words = ["--before", 100, "--force"] if is_record_damaged else ["--step", 2]
    assert holdfast("rm", finished, *words, "--yes").status == 0
    if is_record_damaged:
        record = finished / names.emptied(1)
        record.write_bytes(record.read_bytes()[:-9])
    for path in list(finished.glob("step-*/*")):
        path.unlink()
    with api.Checkpointer(finished, {"x": torch.zeros(4)}, quiet=True) as ckpt, pytest.raises(Corrupt):
        ckpt.restore()
