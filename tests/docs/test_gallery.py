"""The gallery: each scene of its script is on the page with its output, and one is run again."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "gallery.md"


def load() -> ModuleType:
    """Import the script of the gallery."""
    path = ROOT / "docs" / "pictures" / "gallery.py"
    spec = importlib.util.spec_from_file_location("gallery", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_scene_is_on_the_page_with_its_output() -> None:
    text = PAGE.read_text()
    outputs = dict(re.findall(r"<!-- scene (\w+) -->\n```console\n(.*?)```\n<!-- /scene", text, re.S))
    assert outputs.keys() == load().SCENES.keys()
    assert [name for name, output in outputs.items() if output.count("\n") < 3] == []


def test_a_scene_replaces_its_own_output_only() -> None:
    page = "a\n<!-- scene one -->\nold\n<!-- /scene one -->\nb\n"
    expected = "a\n<!-- scene one -->\n```console\nnew\n```\n<!-- /scene one -->\nb\n"
    assert load().with_scene(page, "one", ["new"]) == expected
    with pytest.raises(ValueError, match="has no scene two"):
        load().with_scene(page, "two", [])


@pytest.mark.slow
def test_the_scene_of_a_damaged_checkpoint_runs(tmp_path: Path) -> None:
    gallery = load()
    stage = gallery.Stage(tmp_path)
    gallery.damage(stage)
    output = "\n".join(stage.lines)
    assert "step 100, attempt 1: DAMAGED, 1 problem" in output
    assert "holdfast: skipped step 100 of attempt 1" in output
    assert "holdfast: restored step 80 from" in output
    assert str(tmp_path) not in output
