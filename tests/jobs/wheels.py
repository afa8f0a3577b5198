"""Small wheels, packages and Python environments for tests of `pip install`, without a network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_BACKEND = """
import importlib.util, os, zipfile
METADATA = "Metadata-Version: 2.1\\nName: edited\\nVersion: 1.0\\n"
WHEEL = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
if importlib.util.find_spec("shared") is not None:
    raise SystemExit("an isolated build must not see the packages of the parent")
def build_editable(folder, settings=None, metadata=None):
    name = "edited-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("edited.pth", os.getcwd())
        wheel.writestr("edited-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("edited-1.0.dist-info/WHEEL", WHEEL)
        wheel.writestr("edited-1.0.dist-info/RECORD", "")
    return name
"""
_PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def write_wheel(folder: Path, name: str, version: str = "1.0") -> Path:
    """Write a wheel with a module of its name, which has `VERSION`, and a program `NAME-show`."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    show = f"import sys\ndef show(): print('{name}', VERSION, 'by', sys.executable)\n"
    files = {
        f"{name}.py": f"VERSION = '{version}'\n{show}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-show = {name}:show\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{one},,\n" for one in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for one, text in files.items():
            wheel.writestr(one, text)
    return path


def write_package(folder: Path) -> None:
    """Write a package `edited` in development, with a build that needs no other package."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PYPROJECT)
    (folder / "backend.py").write_text(_BACKEND)
    (folder / "edited.py").write_text("VERSION = 'edited'\n")


def make_parent(folder: Path, *wheels: Path, has_pip: bool = True) -> Path:
    """Make a Python environment with wheels installed, and return the folder of its programs.

    Skips the test where Python has no pip to install.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    programs = folder / "bin"
    ensurepip = pytest.importorskip("ensurepip", reason="this Python cannot install pip")
    bundled = [*(Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")]
    if not bundled:
        pytest.skip("this Python cannot install pip")
    for wheel in wheels:
        install = [sys.executable, str(bundled[0] / "pip"), "--python", str(programs / "python"), "install"]
        subprocess.run([*install, "-q", "--no-index", "--no-deps", str(wheel)], check=True)
    if has_pip:
        (site,) = (folder / "lib").glob("python3*/site-packages")
        with zipfile.ZipFile(bundled[0]) as pip:
            pip.extractall(site)
    return programs


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder, without compiled modules."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
