"""The tables of measurements in the documents: written from the newest results, alike in all documents."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TABLE = [sys.executable, str(ROOT / "benchmarks" / "table.py")]


@pytest.mark.parametrize("document", ["README.md", "benchmarks/RESULTS.md", "docs/limits.md", "docs/why.md"])
def test_tables_are_those_of_the_newest_results(document: str) -> None:
    done = subprocess.run(
        [*TABLE, "--check", str(ROOT / document)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, f"run `python benchmarks/table.py {document}`\n{done.stderr}"


def test_a_number_that_was_edited_is_found(tmp_path: Path) -> None:
    for document, right, wrong in (
        ("README.md", " ms with Holdfast", "0 ms with Holdfast"),
        ("benchmarks/RESULTS.md", "| holdfast | ", "| holdfast | 0"),
    ):
        copy = tmp_path / "page.md"
        copy.write_text((ROOT / document).read_text().replace(right, wrong, 1))
        assert subprocess.run([*TABLE, "--check", str(copy)], check=False).returncode == 1


@pytest.mark.parametrize(
    "script", ["benchmarks/chart.py", "docs/pictures/concepts.py", "docs/pictures/demo.py"]
)
def test_pictures_are_those_of_their_results(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / script), "--check"], check=False)
    assert done.returncode == 0, f"run `python {script}`"


def test_a_drawing_that_was_edited_is_found(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "drawing.py", tmp_path / "benchmarks")
    shutil.copytree(ROOT / "docs" / "pictures", tmp_path / "docs" / "pictures")
    script, picture = tmp_path / "docs/pictures/concepts.py", tmp_path / "docs/pictures/save.svg"
    check = [sys.executable, str(script), "--check"]
    assert subprocess.run(check, check=False).returncode == 0
    picture.write_text(picture.read_text().replace("durable", "volatile"))
    assert subprocess.run(check, check=False).returncode == 1


def test_training_lost_is_one_sentence_in_all_documents() -> None:
    sentences = {
        (ROOT / document).read_text().split("<!-- training lost -->\n")[1].split("\n<!-- /")[0]
        for document in ("benchmarks/RESULTS.md", "docs/limits.md")
    }
    assert len(sentences) == 1
