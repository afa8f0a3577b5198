"""Packages that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from release import packages


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this source."""
    out = tmp_path_factory.mktemp("dist")
    packages.build(out)
    return out


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    return dist / f"torch_holdfast-{packages.VERSION}-py3-none-any.whl"


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    return dist / f"torch_holdfast-{packages.VERSION}.tar.gz"


@pytest.fixture(scope="session")
def present(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of this source."""
    return packages.unpacked(wheel, tmp_path_factory.mktemp("present"))


@pytest.fixture(scope="session")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of this source as version 0.2.0."""
    out = tmp_path_factory.mktemp("following")
    packages.build(out, version="0.2.0", wheel_only=True)
    return packages.unpacked(out / "torch_holdfast-0.2.0-py3-none-any.whl", out / "unpacked")
