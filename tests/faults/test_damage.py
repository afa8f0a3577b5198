"""Damaged homes: every kind of damage is found, and training resumes from an intact checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from faults.playground import Playground


def newest_file(playground: Playground, ending: str) -> Path:
    """A file of the newest checkpoint."""
    attempt, step = playground.complete()[0]
    folder = playground.home / f"step-{step:08d}"
    return next(
        path for path in folder.iterdir() if path.name.endswith(ending) and f"a{attempt:04d}" in path.name
    )


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def flip_in_data(playground: Playground) -> None:
    path = newest_file(playground, ".safetensors")
    flip_bit(path, path.stat().st_size // 2)


def flip_in_header(playground: Playground) -> None:
    flip_bit(newest_file(playground, ".safetensors"), 40)


def zero_a_hole(playground: Playground) -> None:
    path = newest_file(playground, ".safetensors")
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))


def truncate(playground: Playground) -> None:
    path = newest_file(playground, ".safetensors")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def lose_data(playground: Playground) -> None:
    newest_file(playground, ".safetensors").unlink()


def lose_part(playground: Playground) -> None:
    next(path for path in newest_file(playground, ".safetensors").parent.glob("rank-*.json")).unlink()


def flip_in_part(playground: Playground) -> None:
    flip_bit(next(newest_file(playground, ".safetensors").parent.glob("rank-*.json")), 300)


def flip_in_manifest(playground: Playground) -> None:
    flip_bit(next(newest_file(playground, ".safetensors").parent.glob("manifest-*.json")), 300)


def reseal_manifest(playground: Playground, **changes: object) -> None:
    """Change members of the newest manifest's first line, and seal it again."""
    from holdfast.checkpoint.format.sealed import dumps, seal

    path = next(newest_file(playground, ".safetensors").parent.glob("manifest-*.json"))
    head, *catalogs = path.read_bytes().split(b"\n")
    body = json.loads(head) | changes
    del body["xxh3_128"]
    path.write_bytes(seal(b"\n".join((dumps(body), *catalogs))))


def manifest_of_the_future(playground: Playground) -> None:
    reseal_manifest(playground, version=99)


def manifest_of_another_run(playground: Playground) -> None:
    reseal_manifest(playground, run="f" * 32)


def data_of_another_step(playground: Playground) -> None:
    newest = newest_file(playground, ".safetensors")
    older = sorted(path for path in playground.home.glob("step-*/*.safetensors") if path != newest)[-1]
    shutil.copyfile(older, newest)


DAMAGES: list[tuple[Callable[[Playground], None], str]] = [
    (flip_in_data, "chunk"),
    (flip_in_header, "chunk"),
    (zero_a_hole, "chunk"),
    (truncate, "bytes"),
    (lose_data, "missing"),
    (lose_part, "missing"),
    (flip_in_part, ""),
    (flip_in_manifest, "seal"),
    (manifest_of_the_future, "version 99"),
    (manifest_of_another_run, "another run"),
    (data_of_another_step, "chunk"),
]


@pytest.mark.parametrize(("damage", "word"), DAMAGES, ids=lambda item: getattr(item, "__name__", None))
def test_the_run_resumes_from_the_newest_intact_checkpoint(
    playground: Playground, uninterrupted: str, damage: Callable[[Playground], None], word: str
):
    """Damage to the newest of three: it is skipped by name, with the reason, and nothing else is lost."""
    child = playground.start("--step-s", "0.01", HOLDFAST_KILL_AT="trainer.handed:5")
    child.wait()
    playground.wait_for_keepers()
    assert [step for _, step in playground.complete()] == [10, 8, 6]
    damage(playground)
    second = playground.finish()
    assert "restored step 8 " in second.said()
    assert "skipped step 10 of attempt 1" in second.said()
    assert word in second.said()
    assert playground.final() == uninterrupted
    assert holdfast.open(playground.home).verify().is_good


def test_an_extra_file_does_no_harm(playground: Playground, uninterrupted: str):
    child = playground.start("--step-s", "0.01", HOLDFAST_KILL_AT="trainer.handed:5")
    child.wait()
    playground.wait_for_keepers()
    (playground.home / "step-00000010" / "notes.txt").write_text("mine")
    (playground.home / "README").write_text("mine too")
    playground.check_finishes_like(uninterrupted, said="restored step 10 ")


@pytest.mark.parametrize("lost", [True, False])
def test_the_runs_own_document_may_be_damaged_or_lost(playground: Playground, uninterrupted: str, lost: bool):
    """The claims and manifests name the run too."""
    child = playground.start("--step-s", "0.01", HOLDFAST_KILL_AT="trainer.handed:5")
    child.wait()
    playground.wait_for_keepers()
    if lost:
        (playground.home / "holdfast.json").unlink()
    else:
        flip_bit(playground.home / "holdfast.json", 60)
    playground.check_finishes_like(uninterrupted, said="restored step 10 ")


def test_training_never_starts_from_zero_over_damaged_checkpoints(playground: Playground):
    """When nothing verifies, the run stops with an error that names every checkpoint."""
    child = playground.start("--step-s", "0.01", HOLDFAST_KILL_AT="trainer.handed:3")
    child.wait()
    playground.wait_for_keepers()
    assert [step for _, step in playground.complete()] == [6, 4, 2]
    for path in playground.home.glob("step-*/*.safetensors"):
        flip_bit(path, path.stat().st_size // 2)
    second = playground.start()
    assert second.wait() == 1
    for step in (6, 4, 2):
        assert f"step {step}, attempt 1" in second.said()
    assert "Corrupt" in second.said()
