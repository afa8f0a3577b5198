"""Claims: numbers are never used twice, nothing is replaced, and a writer that lives is not disturbed."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.home.claim import claim_attempt, claim_run, newest_number
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Conflict, Corrupt, InvalidInput, ResumeWarning, SaveWarning
from making import RUN_ID, make_checkpoint, make_home, reseal
from stage.training import make_checkpointer

WAIT_S = 600.0


def save_steps(home: Path, steps: range, **options: Any) -> None:
    """Save some steps as one attempt that continues the newest; the state is the step."""
    state = {"x": torch.zeros(100)}
    with make_checkpointer(home, state, keep=None, **options) as ckpt:
        ckpt.restore()
        for step in steps:
            state["x"].fill_(step)
            ckpt.save(step)


def restored(home: Path, step: int | None = None, **options: Any) -> tuple[int | None, float]:
    """The step that a new process would restore, and the state."""
    state = {"x": torch.full((100,), -1.0)}
    with make_checkpointer(home, state, **options) as ckpt:
        found = ckpt.restore(step)
    assert state["x"].unique().numel() == 1
    return found, state["x"][0].item()


def delete(home: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in list(home.glob(pattern)):
            path.unlink()


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        names.attempt(7), names.first_saved(7), names.manifest(5, 7), names.part(5, 7, 3),
        names.data(5, 7, 0), names.frozen(5, 7, 0), names.refusal(5, 7), names.history(7, 2),
        f"compiled/{'0' * 32}/a0007-rank-00000-0001.json", f"compiled/{'0' * 32}/a0007-{'f' * 32}.pack",
    ],
)  # fmt: skip
def test_any_name_shows_that_a_number_is_used(name: str) -> None:
    """Whatever is in the object: it may be damaged."""
    store = MemoryStore()
    store.put(name, b"\0")
    store.put("step-00000009/notes-a9999.txt.mine", b"")
    assert newest_number(MemoryStore()) == 0
    store.delete("step-00000009/notes-a9999.txt.mine")
    assert newest_number(store) == 7
    assert claim_attempt(store, RUN_ID, world_size=1).number == 8


@pytest.mark.parametrize(
    "lost",
    [
        ("attempts/*",), ("attempts/*", "holdfast.json"), ("attempts/*", "history/*", "holdfast.json"),
        ("attempts/*", "step-*/manifest-*"), ("attempts/*", "history/*", "step-*/manifest-*"),
    ],
)  # fmt: skip
def test_lost_claims_never_lose_or_mix_what_is_saved_next(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """Going back to step 1 after the claims are lost: what is saved then is what is restored next."""
    home = tmp_path / "home"
    save_steps(home, range(1, 4))
    delete(home, *lost)
    before = {path: path.read_bytes() for path in home.glob("step-*/*")}
    state = {"x": torch.zeros(100)}
    with make_checkpointer(home, state, keep=None) as ckpt:
        assert ckpt.restore(step=1) == 1
        state["x"].fill_(22)
        ckpt.save(2)
    assert restored(home) == (2, 22)
    assert all(path.read_bytes() == content for path, content in before.items() if path.exists())
    assert {path.name for path in home.glob("step-00000002/manifest-*")} >= {"manifest-a0002.json"}


@pytest.mark.parametrize("harm", [b"", b"\0" * 209])
def test_damaged_claims_count_by_their_names(tmp_path: Path, harm: bytes) -> None:
    home = tmp_path / "home"
    save_steps(home, range(1, 3))
    for path in home.glob("attempts/*"):
        path.write_bytes(harm)
    save_steps(home, range(3, 4))
    assert (home / names.manifest(3, 2)).exists()
    assert restored(home) == (3, 3)


def test_a_number_that_only_a_local_folder_has_used_is_not_used_again(tmp_path: Path) -> None:
    """Home has lost all but its name; the nearer tier still has what attempt 1 saved."""
    home, local = tmp_path / "home", tmp_path / "local"
    save_steps(home, range(1, 3), local=local)
    delete(home, "*/*", "done.json")
    save_steps(home, range(3, 4), local=local)
    assert (home / names.manifest(3, 2)).exists()
    assert restored(home, local=local) == (3, 3)


# -- a claim that is lost while its writer lives -------------------------------------------------------------


def begin(home: Path, state: dict[str, Any], **options: Any) -> holdfast.Checkpointer:
    """A Checkpointer that has claimed its attempt and saved nothing."""
    ckpt = make_checkpointer(home, state, **options)
    next(iter(ckpt.steps(100)))
    return ckpt


def test_a_lost_claim_is_written_again_by_the_next_save(tmp_path: Path) -> None:
    home = tmp_path / "home"
    ckpt = begin(home, {"x": torch.ones(3)})
    claim = (home / names.attempt(1)).read_bytes()
    (home / names.attempt(1)).unlink()
    ckpt.save(1).wait_durable(WAIT_S)
    assert (home / names.attempt(1)).read_bytes() == claim
    ckpt.close()


def test_two_writers_with_one_number_never_mix_their_files(tmp_path: Path) -> None:
    """The first one's claim is lost before it saved, a second one takes its number: only that one saves."""
    home = tmp_path / "home"
    first = begin(home, {"x": torch.full((100,), 1.0)})
    delete(home, "attempts/*", "history/*")
    second = begin(home, {"x": torch.full((100,), 2.0)}, take_over=True)
    second.save(5).wait_durable(WAIT_S)
    with pytest.raises(Conflict, match="has claimed the same number since"):
        first.save(5).wait_durable(WAIT_S)
    with contextlib.suppress(Conflict):
        first.close()
    second.close()
    assert [path.name for path in home.glob("step-*/manifest-*")] == ["manifest-a0001.json"]
    assert restored(home) == (5, 2)


# -- nothing is replaced -------------------------------------------------------------------------------------


def test_files_under_the_names_of_a_save_are_left_alone(tmp_path: Path) -> None:
    """Data file and part of other bytes: this save fails and says so, the next one does not."""
    home = tmp_path / "home"
    ckpt = begin(home, {"x": torch.ones(100)}, keep=None)
    store = open_store(home)
    store.put(names.data(5, 1, 0), b"data of somebody")
    store.put(names.part(5, 1, 0), b"part of somebody")
    with pytest.raises(InvalidInput, match=r"Step 5 of attempt 1 was written before with other bytes"):
        ckpt.save(5).wait_durable(WAIT_S)
    with pytest.warns(SaveWarning, match="Step 5"):
        ckpt.save(6).wait_durable(WAIT_S)
    ckpt.close()
    assert store.get(names.data(5, 1, 0)) == b"data of somebody"
    assert store.get(names.part(5, 1, 0)) == b"part of somebody"
    assert restored(home)[0] == 6


def test_a_data_file_that_no_part_describes_gives_way(tmp_path: Path) -> None:
    """An earlier try of the same save, by the same attempt, came only so far."""
    home = tmp_path / "home"
    ckpt = begin(home, {"x": torch.ones(100)})
    open_store(home).put(names.data(5, 1, 0), b"half a try")
    ckpt.save(5).wait_durable(WAIT_S)
    ckpt.close()
    assert restored(home) == (5, 1)


def test_a_manifest_of_other_files_is_not_taken_for_a_commit(tmp_path: Path) -> None:
    """Its mere presence says nothing: it must name the file that this rank has written."""
    home = tmp_path / "home"
    ckpt = begin(home, {"x": torch.ones(100)})
    other = MemoryStore()
    make_checkpoint(other, 5, 1, [{"x": torch.zeros(100)}])
    reseal(other, names.manifest(5, 1), run=claim_run(open_store(home)))
    open_store(home).put(names.manifest(5, 1), other.get(names.manifest(5, 1)))
    with pytest.raises(Corrupt, match="does not name the files that rank 0 has written"):
        ckpt.save(5).wait_durable(WAIT_S)
    with pytest.warns(SaveWarning):
        ckpt.save(6)
    ckpt.close()
    assert restored(home) == (6, 1)


# -- the run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [None, b"", b"\0" * 153, b"not ours"])
@pytest.mark.parametrize("left", ["claims", "manifests", "parts"])
def test_the_document_of_the_run_is_made_again_from_what_else_names_it(left: str, harm: bytes | None) -> None:
    store = MemoryStore()
    make_home(store)
    make_checkpoint(store, 5, 1, [{"x": torch.ones(3)}])
    if left != "claims":
        store.delete(names.attempt(1))
    if left == "parts":
        store.delete(names.manifest(5, 1))
    store.delete(names.RUN)
    if harm is not None:
        store.put(names.RUN, harm)
    assert claim_run(store) == RUN_ID
    assert run.parse(run.Run, store.get(names.RUN), names.RUN).id == RUN_ID


def test_a_home_whose_every_document_is_damaged_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    save_steps(home, range(1, 3))
    for path in home.rglob("*.json"):
        path.write_bytes(b"\0" * path.stat().st_size)
    with make_checkpointer(home, {"x": torch.zeros(100)}) as ckpt:
        with pytest.raises(Corrupt, match=r"holdfast\.json"):
            ckpt.restore()
        with pytest.raises((Corrupt, InvalidInput)):
            ckpt.save(9)


# -- never from zero -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_loop", [False, True])
@pytest.mark.parametrize(
    ("lost", "sign"),
    [
        (("step-*/*",), "attempts/a0001-saved.json: attempt 1 has had a complete checkpoint"),
        (("step-*/*", "attempts/*", "done.json"), "records that step 3 was complete"),
        (("step-*/*", "attempts/*", "history/*"), "done.json, which is written when a run has finished"),
        (
            ("step-*/*.safetensors", "step-*/manifest-*", "attempts/*", "history/*", "done.json"),
            "but not the data file that was written before it",
        ),
        (
            ("step-*/*.json", "attempts/*", "history/*", "done.json"),
            "rank 0: data files of 3 steps, of which no part is left",
        ),
    ],
)
def test_no_run_begins_from_zero_beside_signs_of_lost_checkpoints(
    tmp_path: Path, lost: tuple[str, ...], sign: str, is_in_loop: bool
) -> None:
    home = tmp_path / "home"
    with make_checkpointer(home, {"x": torch.zeros(100)}, every=1) as ckpt:
        list(ckpt.steps(3))
    delete(home, *lost)
    before = sorted(home.rglob("*"))
    with make_checkpointer(home, {"x": torch.zeros(100)}) as ckpt:
        with pytest.raises(Corrupt, match="must not start from zero") as caught:
            list(ckpt.steps(9)) if is_in_loop else ckpt.restore()
        assert sign in str(caught.value)
        if not is_in_loop:
            with pytest.raises(Corrupt, match="must not start from zero"):
                ckpt.save(1)
            assert sorted(home.rglob("*")) == before


def test_a_damaged_part_is_a_sign_and_one_that_was_cut_short_is_none(tmp_path: Path) -> None:
    """A kill leaves whole files only: a data file without its part, or parts of some ranks."""
    store = open_store(tmp_path / "home")
    make_home(store)
    make_checkpoint(store, 5, 1, [{"x": torch.ones(100)}, {"y": torch.ones(3)}], commit=False)
    make_checkpoint(store, 6, 1, [{"x": torch.ones(100)}, {"y": torch.ones(3)}], commit=False)
    store.delete(names.part(5, 1, 1))
    store.delete(names.part(6, 1, 0))
    assert restored(tmp_path / "home") == (None, -1)
    content = store.get(names.part(5, 1, 0))
    store.put(names.part(5, 1, 0), content[:-1] + b"?")
    with pytest.raises(Corrupt, match=r"step 5 of attempt 1: .*its catalog does not match its digest"):
        restored(tmp_path / "home")


def test_claims_without_a_save_are_no_sign(tmp_path: Path) -> None:
    """Attempts that crashed before their first checkpoint was complete."""
    make_home(open_store(tmp_path / "home"), attempts=(1, 2, 3))
    assert restored(tmp_path / "home") == (None, -1)
    save_steps(tmp_path / "home", range(1, 2))
    assert (tmp_path / "home" / names.manifest(1, 4)).exists()


# -- reading beside a writer ---------------------------------------------------------------------------------


def test_restoring_claims_and_writes_nothing(tmp_path: Path) -> None:
    """Neither does closing a Checkpointer that has only restored; the writer is not fenced."""
    home, state = tmp_path / "home", {"x": torch.full((100,), 1.0)}
    with make_checkpointer(home, state, keep=None) as writer:
        writer.save(1).wait_durable(WAIT_S)
        before = {path: path.read_bytes() for path in home.glob("[!h]*/*")}  # its history may go on
        assert restored(home) == (1, 1)
        with make_checkpointer(home, {"x": torch.zeros(100)}) as reader:
            assert reader.restore(only=["x"]) == 1
            assert reader.latest_step() == 1
        assert {path: path.read_bytes() for path in home.glob("[!h]*/*")} == before
        assert not list(home.glob("history/a0002*"))
        writer.save(2).wait_durable(WAIT_S)
    assert restored(home)[0] == 2


def test_a_save_that_lacks_its_manifest_is_read_and_left_to_its_writer(tmp_path: Path) -> None:
    """It may be about to be committed, or refused; who claims the home later writes the manifest."""
    home = tmp_path / "home"
    save_steps(home, range(1, 3))
    manifest = home / names.manifest(2, 1)
    manifest.unlink()
    assert restored(home) == (2, 2)
    assert not manifest.exists()
    state = {"x": torch.zeros(100)}
    with make_checkpointer(home, state, keep=None) as ckpt:
        assert ckpt.restore() == 2
        assert not manifest.exists()
        ckpt.save(3)
    assert manifest.exists()
    assert holdfast.open(home, step=2).verify().is_good


def test_a_second_writer_in_one_process_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = make_checkpointer(home, {"x": torch.ones(100)})
    first.save(1).wait_durable(WAIT_S)
    second = make_checkpointer(home, {"x": torch.ones(100)})
    assert second.restore() == 1
    with pytest.raises(
        Conflict, match=f"another Checkpointer of this process on host {socket.gethostname()}"
    ):
        second.save(2)
    with pytest.raises(Conflict, match="is being written by attempt 1"):
        next(iter(make_checkpointer(home, {"x": torch.ones(100)}).steps(9)))
    first.save(2).wait_durable(WAIT_S)
    first.close()
    assert second.restore() == 2
    second.save(3).wait_durable(WAIT_S)
    second.close()
    assert restored(home)[0] == 3


def test_a_start_that_lost_the_race_after_its_restore_is_refused(tmp_path: Path) -> None:
    """Another attempt has committed meanwhile, and has ended: saving now would throw its steps away."""
    home = tmp_path / "home"
    save_steps(home, range(1, 2))
    late_state = {"x": torch.zeros(100)}
    late = make_checkpointer(home, late_state)
    assert late.restore() == 1
    save_steps(home, range(2, 4))
    with pytest.raises(Conflict, match=r"Attempt 2 has committed step 3 .* restored step 1"):
        late.save(2)
    assert sorted(path.name for path in home.glob("attempts/a*[0-9].json")) == ["a0001.json", "a0002.json"]
    assert late.restore() == 3
    late.save(4)
    late.close()
    assert restored(home)[0] == 4


def test_who_found_nothing_is_refused_when_there_is_something(tmp_path: Path) -> None:
    home = tmp_path / "home"
    late = make_checkpointer(home, {"x": torch.zeros(100)})
    assert late.restore() is None
    save_steps(home, range(1, 2))
    with pytest.raises(Conflict, match="restored nothing"):
        late.save(1)
    late.close()
    assert restored(home) == (1, 1)


def test_taking_over_fences_the_writer_that_lives(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = make_checkpointer(home, {"x": torch.ones(100)})
    first.save(1).wait_durable(WAIT_S)
    second = make_checkpointer(home, {"x": torch.ones(100)}, take_over=True)
    assert second.restore() == 1
    second.save(2).wait_durable(WAIT_S)
    with pytest.raises(Conflict, match="Attempt 2 has taken over"):
        first.save(2).wait_durable(WAIT_S)
    # It is fenced, so it is in nobody's way from now on.
    second.close()
    third = make_checkpointer(home, {"x": torch.ones(100)})
    assert third.restore() == 2
    third.save(3).wait_durable(WAIT_S)
    third.close()
    with contextlib.suppress(Conflict):
        first.close()


def test_the_claim_names_this_process(tmp_path: Path) -> None:
    save_steps(tmp_path / "home", range(1, 2))
    claim = run.parse(run.AttemptClaim, (tmp_path / "home" / names.attempt(1)).read_bytes(), "claim")
    assert (claim.host, claim.pid, claim.world_size) == (socket.gethostname(), os.getpid(), 1)


@pytest.mark.parametrize("then_saved", [False, True])
def test_steps_train_from_the_step_that_was_restored_before(tmp_path: Path, then_saved: bool) -> None:
    home = tmp_path / "home"
    save_steps(home, range(1, 4))
    state = {"x": torch.zeros(100)}
    with make_checkpointer(home, state, every=1, keep=None) as ckpt:
        assert ckpt.restore(step=2) == 2
        if then_saved:
            state["x"].fill_(7.0)
            ckpt.save(7).wait_durable()
        trained = []
        for step in ckpt.steps(9):
            assert state["x"][0].item() == step
            trained.append(step)
            state["x"].fill_(step + 1)
    assert trained == list(range(7 if then_saved else 2, 9))
    assert restored(home) == (9, 9.0)
    assert holdfast.open(home, step=3, attempt=1).step == 3, "what was gone back behind stays"


def test_steps_restore_with_the_strictness_and_names_of_the_restore_before(tmp_path: Path) -> None:
    home = tmp_path / "home"
    save_steps(home, range(1, 4))
    state = {"y": torch.zeros(100), "z": torch.ones(1)}
    with make_checkpointer(home, state, every=9) as ckpt:
        with pytest.warns(ResumeWarning, match="left unchanged: z"):
            assert ckpt.restore(strict=False, rename={"x": "y"}) == 3
        assert next(iter(ckpt.steps(9))) == 3
        assert state["y"][0].item() == 3.0


def test_leftovers_of_a_claim_that_was_cut_short_are_swept(tmp_path: Path) -> None:
    home = tmp_path / "home"
    save_steps(home, range(1, 2))
    left = [home / "attempts" / ".unfinished-1-dead", home / ".unfinished-1-dead"]
    for path in left:
        path.write_bytes(b"half a claim")
    state = {"x": torch.zeros(100)}
    with make_checkpointer(home, state, keep=1) as ckpt:
        ckpt.restore()
        for step in (2, 3):
            ckpt.save(step).wait_durable()
    assert not any(path.exists() for path in left)
