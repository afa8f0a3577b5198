"""An import that is killed, overtaken or refused does not prevent the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.checkpoint.exchange.importer import import_checkpoint
from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.claim import read_run_document
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Conflict, Corrupt, NotFound
from making import make_checkpoint, make_home

PUTS = ("claim", "data", "part", "manifest", "run")
"""Objects that an import puts, in order."""
KILLS = [(point, put) for put in PUTS for point in ("store.written", "store.synced", "store.linked")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a safetensors file with a model."""
    save_file({"weight": torch.arange(8.0).reshape(2, 4), "bias": torch.ones(2)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def kill_import(source: Path, home: Path, point: str, put: str) -> None:
    """Run `holdfast import` of step 5, killed at a point of one of its puts."""
    code = "import sys; from holdfast.cli import main; sys.exit(main(['import', *sys.argv[1:]]))"
    command = [sys.executable, "-c", code, str(source), str(home), "--step", "5", "--under", "model"]
    environment = os.environ | {"HOLDFAST_KILL_AT": f"{point}:{PUTS.index(put) + 1}"}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.parametrize(("point", "put"), KILLS)
def test_a_killed_import_is_whole_or_repeatable(source: Path, tmp_path: Path, point: str, put: str) -> None:
    home = tmp_path / "home"
    kill_import(source, home, point, put)
    is_complete = (put, point) == ("manifest", "store.linked") or put == "run"
    assert (len(candidates(list_home(open_store(home)))) == 1) == is_complete
    if is_complete:
        with pytest.raises(Conflict, match="1 saved step"):
            import_checkpoint(source, home, step=6)
    else:
        with pytest.raises(NotFound):
            holdfast.open(home)
        import_checkpoint(source, home, step=6, under="model")
    checkpoint = holdfast.open(home)
    assert checkpoint.step == (5 if is_complete else 6)
    report = checkpoint.verify()
    assert (report.is_good, report.extra) == (True, ())
    assert torch.equal(checkpoint["model.bias"], torch.ones(2))
    assert len(list(home.rglob("*.safetensors"))) == 1
    assert is_complete or list(home.rglob(".unfinished*")) == []


@pytest.mark.parametrize(("point", "put"), [("store.linked", "part"), ("store.linked", "manifest")])
def test_training_starts_from_a_killed_import_that_lacks_only_its_manifest(
    source: Path, tmp_path: Path, point: str, put: str
) -> None:
    """The next start of the run commits it, as after a keeper that was killed before its manifest."""
    home = tmp_path / "home"
    kill_import(source, home, point, put)
    model = torch.nn.Linear(4, 2)
    with holdfast.Checkpointer(home, {"model": model}) as ckpt:
        assert ckpt.restore(only=["model"]) == 5
        ckpt.save(6)
    assert torch.equal(model.bias, torch.ones(2))
    run = read_run_document(open_store(home))
    assert run is not None
    assert {holdfast.open(home, step).run for step in (5, 6)} == {run.id}


def test_the_later_of_two_imports_into_one_home_wins(source: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    ran = []

    def import_another(num_bytes: int) -> None:
        if not ran:
            ran.append(import_checkpoint(source, home, step=7))

    with pytest.raises(Conflict, match="cancelled"):
        import_checkpoint(source, home, step=5, on_bytes=import_another)
    assert ran
    assert list(list_home(open_store(home)).saved) == [(2, 7)]
    assert holdfast.open(home).verify().is_good
    assert list(home.rglob(".unfinished*")) == []


def test_a_failed_import_deletes_only_its_own_files(source: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    kill_import(source, home, "store.linked", "data")
    before = sorted(entry.name for entry in open_store(home).list())
    assert names.data(5, 1, 0) in before

    def cut_off(num_bytes: int) -> None:
        os.truncate(source, source.stat().st_size - 40)

    with pytest.raises(Corrupt):
        import_checkpoint(source, home, step=5, on_total=cut_off)
    assert sorted(entry.name for entry in open_store(home).list()) == before


@pytest.mark.parametrize("kept", ["all", "no manifest", "no run", "no claim", "another rank"])
def test_a_home_that_may_not_be_of_a_killed_import_is_left_alone(source: Path, kept: str) -> None:
    store = MemoryStore()
    make_home(store)
    num_ranks = 2 if kept == "another rank" else 1
    make_checkpoint(store, 3, 1, [{"w": torch.ones(2)}] * num_ranks, per_rank=["w"])
    gone = {
        "all": [],
        "no manifest": [names.manifest(3, 1)],
        "no run": [names.RUN],
        "no claim": [names.RUN, names.manifest(3, 1), names.attempt(1)],
        "another rank": [names.RUN, names.manifest(3, 1)],
    }
    for name in gone[kept]:
        store.delete(name)
    before = {entry.name: store.get(entry.name) for entry in store.list()}
    with pytest.raises(Conflict, match="already"):
        import_checkpoint(source, store)
    assert {entry.name: store.get(entry.name) for entry in store.list()} == before
