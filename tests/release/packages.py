"""The wheel and the sdist of this source, or of it as another version, and places to run them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOP = (".ci", ".github", "benchmarks", "campaigns", "changes", "docs", "examples", "src", "tests")
VERSION = "0.1.0"
LINKED = ("torch", "numpy")
"""Distributions that an environment of a test takes from this one, with all that they need."""


def build(out: Path, *, version: str = VERSION, wheel_only: bool = False) -> None:
    """Build the packages into a folder, without a network."""
    pytest.importorskip("build", reason="needs the extra `release`")
    pytest.importorskip("hatchling", reason="needs the extra `release`")
    source = out / "source"
    source.mkdir(parents=True)
    for name in TOP if not wheel_only else ("src",):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, source)
    for name in ("pyproject.toml", "src/holdfast/__init__.py"):
        path = source / name
        path.write_text(
            re.sub(rf'^(_*version_* = )"{VERSION}"', rf'\1"{version}"', path.read_text(), flags=re.M)
        )
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    run([*command, *(["--wheel"] if wheel_only else []), str(source)], cwd=out)
    shutil.rmtree(source)


def run(
    command: list[str], *, cwd: Path, fails: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without this source on the path, and check its status."""
    environment = {**os.environ, **variables}
    if "PYTHONPATH" not in variables:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is fails, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def unpacked(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel into a folder, for PYTHONPATH."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def environment_with(wheel: Path, folder: Path) -> Path:
    """Return the folder of the programs of a new virtual environment into which a wheel is installed.

    torch and numpy are linked, and everything else that the wheel needs comes from PyPI.
    """
    venv.create(folder, with_pip=True, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in sorted(set(_needed(LINKED))):
        _link(name, packages)
    programs = folder / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    asked = subprocess.run(
        [*pip, "--dry-run", str(wheel)], capture_output=True, text=True, check=False, cwd=folder
    )
    if asked.returncode and re.search("No matching distribution|connection|Temporary failure", asked.stderr):
        pytest.skip(f"PyPI cannot be reached: {asked.stderr.strip().splitlines()[-1]}")
    run([*pip, str(wheel)], cwd=folder)
    return programs


def _needed(names: tuple[str, ...]) -> Iterator[str]:
    """Yield distributions of this environment and those that they require."""
    for name in names:
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield re.sub(r"[-_.]+", "-", name).lower()
        yield from _needed(
            tuple(re.split(r"[\s<>=!~;\[(]", one)[0] for one in requirements if "extra" not in one)
        )


def _link(name: str, packages: Path) -> None:
    """Link the files of a distribution into the packages of another environment."""
    distribution = importlib.metadata.distribution(name)
    files = distribution.files or []
    for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
        target = packages / top
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(top))).resolve())
