"""Damaged homes: every kind of damage is found, and training resumes from an intact checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from faults.playground import Playground, flip_bit
from holdfast.checkpoint.format import names
from holdfast.checkpoint.store import open_store
from making import reseal


def zero_a_hole(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))


def reseal_manifest(path: Path, **changes: Any) -> None:
    """Change members of the newest manifest's first line, and seal it again."""
    reseal(open_store(path.parents[1]), names.manifest(10, 1), **changes)


DATA, PART, MANIFEST = "*.safetensors", "rank-*.json", "manifest-*.json"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a flipped bit in data": (DATA, flip_bit, "chunk"),
    "a flipped bit in a header": (DATA, lambda path: flip_bit(path, 40), "chunk"),
    "a hole": (DATA, zero_a_hole, "chunk"),
    "truncated data": (DATA, lambda path: os.truncate(path, path.stat().st_size - 100), "bytes"),
    "lost data": (DATA, Path.unlink, "missing"),
    "data of another step": (
        DATA,
        lambda path: shutil.copyfile(next(path.parents[1].glob(f"step-00000008/{DATA}")), path),
        "chunk",
    ),
    "a lost part": (PART, Path.unlink, "missing"),
    "a flipped bit in a part": (PART, lambda path: flip_bit(path, 300), ""),
    "a flipped bit in a manifest": (MANIFEST, lambda path: flip_bit(path, 300), "seal"),
    "a manifest of the future": (MANIFEST, lambda path: reseal_manifest(path, version=99), "version 99"),
    "a manifest of another run": (MANIFEST, lambda path: reseal_manifest(path, run="f" * 32), "another run"),
}
"""Files of the newest checkpoint, a damage to each of them, and a word of its reason."""


@pytest.mark.parametrize("name", DAMAGES)
def test_the_run_resumes_from_the_newest_intact_checkpoint(
    playground: Playground, uninterrupted: str, name: str
):
    """Damage to the newest of three: it is skipped by name, with the reason, and nothing else is lost."""
    files, damage, word = DAMAGES[name]
    playground.run_until_killed("trainer.handed:5")
    assert [step for _, step in playground.complete()] == [10, 8, 6]
    (path,) = playground.home.glob(f"step-00000010/{files}")
    damage(path)
    second = playground.finish()
    assert "restored step 8 " in second.said()
    assert "skipped step 10 of attempt 1" in second.said()
    assert word in second.said()
    assert playground.final() == uninterrupted
    assert holdfast.open(playground.home).verify().is_good


def test_an_extra_file_does_no_harm(playground: Playground, uninterrupted: str):
    playground.run_until_killed("trainer.handed:5")
    (playground.home / "step-00000010" / "notes.txt").write_text("mine")
    (playground.home / "README").write_text("mine too")
    playground.check_finishes_like(uninterrupted, said="restored step 10 ")


@pytest.mark.parametrize("lost", [True, False])
def test_the_runs_own_document_may_be_damaged_or_lost(playground: Playground, uninterrupted: str, lost: bool):
    """The claims and manifests name the run too."""
    playground.run_until_killed("trainer.handed:5")
    if lost:
        (playground.home / "holdfast.json").unlink()
    else:
        flip_bit(playground.home / "holdfast.json", 60)
    playground.check_finishes_like(uninterrupted, said="restored step 10 ")


def test_training_never_starts_from_zero_over_damaged_checkpoints(playground: Playground):
    """When nothing verifies, the run stops with an error that names every checkpoint."""
    playground.run_until_killed("trainer.handed:3")
    assert [step for _, step in playground.complete()] == [6, 4, 2]
    for path in playground.home.glob("step-*/*.safetensors"):
        flip_bit(path)
    second = playground.start()
    assert second.wait() == 1
    for step in (6, 4, 2):
        assert f"step {step}, attempt 1" in second.said()
    assert "Corrupt" in second.said()
