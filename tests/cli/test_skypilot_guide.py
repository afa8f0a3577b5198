"""Every YAML snippet of SkyPilot's training guide is planned by `holdfast launch`, or rejected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.conftest import Command
from jobs.task.guide import SNIPPETS

SHOWN = {
    "accelerators": "read as the set {A100:1, A100-80GB:1, H100:1}",
    "disk": "no disk is created; kept for other engines",
    "efa": "settings of clouds and clusters; kept for other engines",
    "gpudirect": "settings of clouds and clusters; kept for other engines",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Write the snippets to task files."""
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {name: tmp_path / f"{name}.yaml" for name in SNIPPETS}
    for name, path in found.items():
        path.write_text(SNIPPETS[name])
    return found


@pytest.mark.parametrize("name", SHOWN)
def test_a_snippet_is_planned_and_its_unsupported_keys_are_listed(
    name: str, files: dict[str, Path], holdfast: Command
) -> None:
    result = holdfast("launch", files[name], "--dry-run")
    assert result.status == 0, result.err
    assert SHOWN[name] in result.out
    assert result.out.endswith("nothing was started\n")


def test_the_bert_task_as_printed_lacks_a_value_that_is_named(
    files: dict[str, Path], holdfast: Command
) -> None:
    result = holdfast("launch", files["bert"], "--dry-run").refused()
    line = SNIPPETS["bert"].splitlines().index("  WANDB_API_KEY:") + 1
    assert f"{files['bert']}:{line}: envs.WANDB_API_KEY: WANDB_API_KEY has no value" in result.err


@pytest.mark.parametrize("name", sorted(SNIPPETS.keys() - SHOWN.keys()))
def test_a_snippet_that_needs_more_is_planned_or_rejected_with_line_and_key(
    name: str, files: dict[str, Path], holdfast: Command
) -> None:
    """A cached mount, a workdir to create, or a bucket without a name."""
    result = holdfast("launch", files[name], "--env", "WANDB_API_KEY=key", "--dry-run")
    if result.status == 0:
        assert result.out.endswith("nothing was started\n")
        return
    assert result.status == 2
    where = re.search(rf"{re.escape(str(files[name]))}:(\d+): (\w+)", result.err)
    assert where, result.err
    assert where[2] in ("file_mounts", "workdir")
    assert where[2] in SNIPPETS[name]
