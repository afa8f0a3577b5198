"""Every YAML snippet of SkyPilot's training guide is planned by `holdfast launch`, or refused in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.conftest import Command
from jobs.task.guide import SNIPPETS

TOLD = {
    "accelerators": "read as the set {A100:1, A100-80GB:1, H100:1}",
    "disk": "no disk is created; kept for other engines",
    "efa": "settings of clouds and clusters; kept for other engines",
    "gpudirect": "settings of clouds and clusters; kept for other engines",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The snippets as task files."""
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {name: tmp_path / f"{name}.yaml" for name in SNIPPETS}
    for name, path in found.items():
        path.write_text(SNIPPETS[name])
    return found


@pytest.mark.parametrize("name", TOLD)
def test_a_snippet_is_planned_and_what_means_less_here_is_told(
    name: str, files: dict[str, Path], holdfast: Command
) -> None:
    said = holdfast("launch", files[name], "--dry-run")
    assert said.status == 0, said.err
    assert TOLD[name] in said.out
    assert said.out.endswith("nothing was started\n")


def test_the_bert_task_as_printed_lacks_a_value_and_says_which(
    files: dict[str, Path], holdfast: Command
) -> None:
    said = holdfast("launch", files["bert"], "--dry-run")
    assert said.status == 2
    line = SNIPPETS["bert"].splitlines().index("  WANDB_API_KEY:") + 1
    assert f"{files['bert']}:{line}: envs.WANDB_API_KEY: WANDB_API_KEY has no value" in said.err


@pytest.mark.parametrize("name", sorted(SNIPPETS.keys() - TOLD.keys()))
def test_what_this_machine_may_lack_is_planned_or_refused_with_line_and_key(
    name: str, files: dict[str, Path], holdfast: Command
) -> None:
    """A cached mount, a workdir that the reader has to make, a bucket whose name is to be filled in."""
    said = holdfast("launch", files[name], "--env", "WANDB_API_KEY=key", "--dry-run")
    if said.status == 0:
        assert said.out.endswith("nothing was started\n")
        return
    assert said.status == 2
    where = re.search(rf"{re.escape(str(files[name]))}:(\d+): (\w+)", said.err)
    assert where, said.err
    assert where[2] in ("file_mounts", "workdir")
    assert where[2] in SNIPPETS[name]
