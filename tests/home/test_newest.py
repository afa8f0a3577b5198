"""The newest checkpoint cannot be read for a while: no reader that chooses it takes an older one instead."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.adapters import nebula, recipe
from holdfast.adapters.dcp import HoldfastReader, HoldfastWriter
from holdfast.adapters.nebula import interface, tag_index
from holdfast.checkpoint.home import documents, newest
from holdfast.checkpoint.restore import parts, verify
from holdfast.checkpoint.store import direct_io, local, lookup
from holdfast.cli import main, replay
from holdfast.errors import Denied, NotFound, ResumeWarning, RetryLater

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

PASSING = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.ENOMEM]
REFUSING = [errno.EACCES, errno.EPERM]
QUICK = [errno.EIO, errno.EACCES]
NEWEST, OLDER = 20, 10


def marked(numbers: list[int]) -> list[Any]:
    """Return error numbers as parameters, of which the default tests take a few."""
    return [
        pytest.param(one, id=errno.errorcode[one], marks=() if one in QUICK else pytest.mark.slow)
        for one in numbers
    ]


class Disk:
    """A file system on which opening or reading files of one step fails, a number of times."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int, number: int, times: int, call: str) -> None:
        self.step, self.number, self.left, self.failed, self.call = step, number, times, 0, call
        real_open, real_read, real_read_whole = lookup.open_regular, direct_io.read, direct_io.read_whole

        def open_regular(folder_fd: int, name: str, flags: int) -> int:
            fd = real_open(folder_fd, name, flags)
            if call == "open" and self._is_due(fd):
                os.close(fd)
                self._fail(name)
            return fd

        def read(fd: int, offset: int, buffer: memoryview) -> int:
            if call in ("read", "read data") and self._is_due(fd):
                self._fail(str(fd))
            return real_read(fd, offset, buffer)

        def read_whole(fd: int, num_bytes: int) -> bytes:
            if call in ("read", "read data") and self._is_due(fd):
                self._fail(str(fd))
            return real_read_whole(fd, num_bytes)

        patch.setattr(lookup, "open_regular", open_regular)
        patch.setattr(direct_io, "read", read)
        patch.setattr(direct_io, "read_whole", read_whole)

    def _is_due(self, fd: int) -> bool:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        is_wanted = self.call != "read data" or path.suffix == ".safetensors"
        return self.left > 0 and is_wanted and f"step-{self.step:08d}" in path.parts

    def _fail(self, name: str) -> None:
        self.left, self.failed = self.left - 1, self.failed + 1
        raise OSError(self.number, os.strerror(self.number), name)


def make_state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model}


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Homes with two checkpoints, as each interface writes them."""
    root = tmp_path_factory.mktemp("homes")
    with holdfast.Checkpointer(root / "plain", make_state(0.0), quiet=True) as ckpt:
        for step in (OLDER, NEWEST):
            ckpt.save(step).wait_durable()
    for step in (OLDER, NEWEST):
        state = {"x": torch.full((2,), float(step))}
        dcp.save(state, storage_writer=HoldfastWriter(root / "dcp", step=step))
    nebula.init(persistent_storage_path=str(root / "nebula"))
    for step in (OLDER, NEWEST):
        nebula.Checkpoint(f"global_step{step}", 1).save("model", torch.full((2,), float(step)))
    nebula.flush_persistence()
    interface.end()
    return {name: root / name for name in ("plain", "dcp", "nebula")}


def opened(home: Path) -> int:
    return holdfast.open(home, patience=0.3).step


def resumed(home: Path) -> int | None:
    with holdfast.Checkpointer(home, make_state(0.0), quiet=True, reads=holdfast.Reads(patience=0.3)) as ckpt:
        return ckpt.restore()


def loaded_by_dcp(home: Path) -> int | None:
    reader = HoldfastReader(home)
    reader.read_metadata()  # `dcp.load` calls it first, and wraps its errors
    return reader.step


def newest_of_nebula(home: Path) -> int:
    return int(nebula.get_latest_checkpoint(str(home)).tag.removeprefix("global_step"))


def found_by_nebula(home: Path) -> int:
    found = nebula.get_checkpoint(f"global_step{NEWEST}", str(home))
    assert found is not None, "it was passed over"
    return NEWEST


def listed_by_nebula(home: Path) -> int:
    return next(iter(nebula.list_checkpoints(str(home)).values()))["step"]


def next_after_nebula(home: Path) -> int | None:
    store = local.LocalStore(home)
    return tag_index.TagIndex(str(home), {"home": store}).last_step()


CHOOSERS: dict[str, tuple[str, Callable[[Path], int | None]]] = {
    "Checkpointer.restore": ("plain", resumed),
    "holdfast.open": ("plain", opened),
    "HoldfastReader": ("dcp", loaded_by_dcp),
    "nebula.get_latest_checkpoint": ("nebula", newest_of_nebula),
    "nebula.get_checkpoint": ("nebula", found_by_nebula),
    "nebula.list_checkpoints": ("nebula", listed_by_nebula),
    "nebula's next step": ("nebula", next_after_nebula),
}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Patience of a moment instead of two minutes."""
    for module in ("holdfast.adapters.dcp.reader", "holdfast.adapters.nebula.tag_index", recipe.__name__):
        monkeypatch.setattr(f"{module}.LIMIT_S", 0.3)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@dataclass(frozen=True)
class Choice:
    """A copy of a home, and the function that chooses its newest checkpoint."""

    home: Path
    choose: Callable[[Path], int | None]

    def check(
        self, patch: pytest.MonkeyPatch, number: int, times: int, call: str, *, match: str | None = None
    ) -> None:
        """An error that passes costs no step; with another one no older step is chosen in its place."""
        with patch.context() as within:
            disk = Disk(within, NEWEST, number, times, call)
            if times == 1:
                assert self.choose(self.home) == NEWEST
                assert disk.failed == 1
            else:
                with pytest.raises(RetryLater if number in PASSING else Denied, match=match):
                    self.choose(self.home)
                assert disk.failed
        interface.end()
        assert self.choose(self.home) == NEWEST, "nothing was deleted or marked for good"
        interface.end()


@pytest.fixture
def choice(request: pytest.FixtureRequest, homes: dict[str, Path], tmp_path: Path, hurried: None) -> Choice:
    kind, choose = CHOOSERS[request.param]
    shutil.copytree(homes[kind], tmp_path / "home")
    return Choice(tmp_path / "home", choose)


@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("number", marked([*PASSING, *REFUSING]))
@pytest.mark.parametrize("choice", list(CHOOSERS), indirect=True)
def test_a_newest_that_cannot_be_read_is_never_passed_over(
    choice: Choice, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    choice.check(monkeypatch, number, 10**9, call)


@pytest.mark.parametrize("call", [pytest.param("open", marks=pytest.mark.slow), "read"])
@pytest.mark.parametrize("number", marked(PASSING))
@pytest.mark.parametrize("choice", list(CHOOSERS), indirect=True)
def test_an_error_that_passes_costs_no_step(
    choice: Choice, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    choice.check(monkeypatch, number, 1, call)


@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("choice", ["Checkpointer.restore", "nebula.get_latest_checkpoint"], indirect=True)
def test_bytes_that_cannot_be_read_are_not_called_damaged(
    choice: Choice, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    choice.check(monkeypatch, errno.EIO, times, "read data", match=f"Step {NEWEST} of attempt 1")


@pytest.mark.filterwarnings("ignore::holdfast.errors.ResumeWarning", "ignore::holdfast.errors.SaveWarning")
@pytest.mark.parametrize("choice", ["Checkpointer.restore", "holdfast.open", "HoldfastReader"], indirect=True)
def test_a_newest_that_is_damaged_is_still_passed_over(choice: Choice) -> None:
    (manifest,) = choice.home.glob(f"step-{NEWEST:08d}/manifest-*.json")
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert choice.choose(choice.home) == OLDER


def test_dcp_warns_of_a_damaged_newest(homes: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(homes["dcp"], home)
    (manifest,) = home.glob(f"step-{NEWEST:08d}/manifest-*.json")
    manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.warns(ResumeWarning, match="step 20 of attempt 1 is damaged"):
        assert loaded_by_dcp(home) == OLDER


def test_verify_does_not_call_damaged_what_it_could_not_read(
    homes: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = holdfast.open(homes["plain"]).manifest
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.cli.verify.read_manifest", lambda *_: manifest)
        Disk(patch, NEWEST, errno.EIO, 10**9, "read")
        assert main(["verify", str(homes["plain"])]) == 2
    said = capsys.readouterr().out
    assert "COULD NOT BE READ" in said
    assert "DAMAGED" not in said


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("times", [1, 10**9])
def test_the_recipe_loads_no_older_step_for_an_error_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, hashed: bool
) -> None:
    folder = tmp_path / "checkpoints"

    @recipe.save_checkpoint(save_dir=str(folder))
    def save(step: int) -> None:
        torch.save({"step": step}, folder / f"model_{step}.pt")

    @recipe.load_checkpoint(save_dir=str(folder))
    def load(step: int) -> int:
        return torch.load(folder / f"model_{step}.pt", weights_only=True)["step"]

    for step in (OLDER, NEWEST):
        save(step)
    if not hashed:
        for step in (OLDER, NEWEST):
            path = folder / f"checkpoint_step_{step}_metadata.json"
            path.write_text(f'{{"step": {step}, "timestamp": "now", "model_type": "Linear"}}')
    left = times
    real = recipe.open_regular

    def refuse(path: Path) -> Any:
        nonlocal left
        if path.name == f"model_{NEWEST}.pt" and left > 0:
            left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "open_regular", refuse)
        if times == 1:
            assert load(0) == NEWEST
        else:
            with pytest.raises(RetryLater, match="Stale"):
                load(0)
    assert load(0) == NEWEST


def save_one(home: Path, step: int) -> None:
    with holdfast.Checkpointer(home, make_state(0.0), quiet=True, keep=1) as ckpt:
        ckpt.restore()
        ckpt.save(step).wait_durable()


@pytest.mark.parametrize("reader", ["open", "ls", "verify"])
def test_a_checkpoint_deleted_after_it_was_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reader: str
) -> None:
    """A run with keep=1 deletes it in that moment, once its successor is complete."""
    home = tmp_path / "home"
    save_one(home, OLDER)
    real, waiting = local.LocalStore.get, [NEWEST]

    def get(store: local.LocalStore, name: str) -> bytes:
        if waiting and f"step-{OLDER:08d}/manifest" in name:
            save_one(home, waiting.pop())
        return real(store, name)

    monkeypatch.setattr(local.LocalStore, "get", get)
    if reader == "open":
        assert opened(home) == NEWEST
        return
    status = main([reader, str(home)])
    said = capsys.readouterr()
    assert (status, "damaged" in said.out.lower()) == (0, False), said
    assert not waiting


def test_verify_does_not_call_damaged_what_is_deleted_while_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    save_one(home, OLDER)
    real, waiting = verify.list_home, [NEWEST]

    def list_home(store: Any, step: int) -> Any:
        found = real(store, step=step)
        if waiting:
            save_one(home, waiting.pop())  # which deletes the one that is verified now
        return found

    monkeypatch.setattr(verify, "list_home", list_home)
    assert main(["verify", str(home)]) == 0
    said = capsys.readouterr()
    assert f"step {NEWEST}, attempt 2: good" in said.out
    assert "DAMAGED" not in said.out


@pytest.mark.filterwarnings("error")
def test_nebula_lists_again_if_its_newest_is_deleted_meanwhile(
    homes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    shutil.copytree(homes["nebula"], home)
    away = tmp_path / "newest"
    (home / f"step-{NEWEST:08d}").rename(away)
    real = newest.read_manifest

    def read_manifest(store: Any, *rest: Any) -> Any:
        if away.exists():  # a run completes a checkpoint and deletes the one before
            away.rename(home / f"step-{NEWEST:08d}")
            shutil.rmtree(home / f"step-{OLDER:08d}")
        return real(store, *rest)

    monkeypatch.setattr(newest, "read_manifest", read_manifest)
    assert newest_of_nebula(home) == NEWEST
    interface.end()


def test_a_replay_lists_again_if_a_checkpoint_is_deleted_meanwhile(
    homes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    shutil.copytree(homes["plain"], home)
    with holdfast.Checkpointer(home, make_state(0.0), quiet=True) as ckpt:
        ckpt.restore()
        ckpt.save(NEWEST + 10).wait_durable()
    real, folder = replay.candidates, home / f"step-{NEWEST:08d}"

    def candidates(listing: Any) -> Any:
        if folder.exists():
            shutil.rmtree(folder)
        return real(listing)

    monkeypatch.setattr(replay, "candidates", candidates)
    start, end = replay.find_span(local.LocalStore(home), None, NEWEST + 10)
    assert (start.step, end.step) == (OLDER, NEWEST + 10)
    with pytest.raises(NotFound, match="step 20"):
        replay.find_span(local.LocalStore(home), NEWEST, None)


@pytest.mark.parametrize("command", ["export", "diff"])
def test_a_command_names_the_deletion_of_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    home = tmp_path / "home"
    save_one(home, OLDER)
    shutil.copytree(home, tmp_path / "other")
    real, waiting = documents.read_part, [NEWEST]

    def read_part(*args: Any) -> Any:
        if waiting:
            save_one(home, waiting.pop())
        return real(*args)

    monkeypatch.setattr(parts, "read_part", read_part)
    other = tmp_path / ("out.safetensors" if command == "export" else "other")
    assert main([command, str(home), str(other)]) == 2
    assert "Step 10 of attempt 1" in (said := capsys.readouterr().err)
    assert "was deleted by its run while it was read" in said
