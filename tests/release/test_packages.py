"""The wheel and the sdist: their contents and metadata, and a new user's first steps with each."""

from __future__ import annotations

import email
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from release import packages

ROOT = packages.ROOT
MAX_WHEEL_BYTES = 2_000_000
SDIST_TESTS = (
    "tests/test_units.py",
    "tests/test_policy.py",
    "tests/format",
    "tests/docs/test_distribution.py",
)


def metadata() -> ModuleType:
    """The hook of the build."""
    return pytest.importorskip("hatch_build", reason="needs the extra `release`")


def test_links_need_the_address_of_the_repository() -> None:
    assert metadata().urls("") == {}
    found = metadata().urls("https://host.example/owner/name")
    assert found["Source"] == "https://host.example/owner/name"
    assert all(link.startswith("https://host.example/owner/name") for link in found.values())


def test_the_page_of_the_package_has_no_link_that_needs_the_files_beside_it() -> None:
    page = (ROOT / "README.md").read_text()
    bare = metadata().as_page(page, "")
    assert re.findall(r"\]\((?![a-z]+:)[^)]*\)", page)
    assert re.findall(r"\]\((?![a-z]+:)[^)]*\)", bare) == []
    linked = metadata().as_page(
        "![Chart](docs/a.svg) and [text](docs/b.md)", "https://host.example/owner/name"
    )
    assert linked == (
        "![Chart](https://host.example/owner/name/raw/main/docs/a.svg) and "
        "[text](https://host.example/owner/name/blob/main/docs/b.md)"
    )


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        found = email.message_from_string(archive.read(metadata).decode())
    assert {name.split("/")[0] for name in names} == {"holdfast", metadata.split("/")[0]}
    assert "holdfast/py.typed" in names
    assert "holdfast/testing/store_suite.py" in names
    assert not [name for name in names if "tests" in name.split("/") or name.endswith("conftest.py")]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    assert found["Version"] == packages.VERSION
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert found.get_all("Project-URL") is None  # until the repository has an address
    assert "Guarantees" in found.get_payload()


@pytest.mark.slow
def test_the_package_index_would_accept_them(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    pytest.importorskip("twine", reason="needs the extra `release`")
    packages.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], cwd=tmp_path)


@pytest.mark.slow
def test_a_new_user_s_first_steps_work_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In a new virtual environment, in an empty folder: demo, tutorial and check."""
    programs = packages.environment_with(wheel, tmp_path / "environment")
    python, holdfast = str(programs / "python"), str(programs / "holdfast")
    work = tmp_path / "work"
    work.mkdir()

    def run(*command: str) -> str:
        return packages.run(list(command), cwd=work, HOLDFAST_STATE=str(tmp_path / "state")).stdout

    where = run(python, "-c", "import holdfast; print(holdfast.__file__)").strip()
    assert Path(where).is_relative_to(tmp_path / "environment")
    assert f'"holdfast": "{packages.VERSION}"' in run(holdfast, "version", "--json")
    assert '"proven": true' in run(holdfast, "demo", "--steps", "48", "--size", "25MB", "--json")
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    found = re.search(r"^<!-- run -->\n```python\n(.*?)^```", tutorial, re.M | re.S)
    assert found
    (work / "train.py").write_text(found[1])
    assert "step 2000: loss" in run(python, "train.py")
    assert "2000" in run(holdfast, "ls", "runs/tutorial")
    run(holdfast, "check", "train.py")


@pytest.mark.slow
def test_the_tests_of_the_sdist_run_from_the_sdist(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (source,) = tmp_path.glob("torch_holdfast-*")
    done = packages.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SDIST_TESTS],
        cwd=source,
        PYTEST_DEBUG_TEMPROOT=str(tmp_path),
    )
    assert re.search(r"^\d{3,} passed", done.stdout.splitlines()[-1])
    code = "import conftest, holdfast; print(holdfast.__file__)"
    where = packages.run(
        [sys.executable, "-c", code], cwd=tmp_path, PYTHONPATH=f"{source / 'src'}:{source / 'tests'}"
    ).stdout
    assert Path(where.strip()).is_relative_to(source)
