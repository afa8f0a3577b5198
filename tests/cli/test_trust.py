"""`holdfast trust`: what it writes is what trainings read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.compiled.trust import is_trusted

if TYPE_CHECKING:
    from cli.conftest import Command


def test_a_home_is_trusted_listed_and_no_longer_trusted(
    holdfast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    home = str(tmp_path / "runs")
    assert not is_trusted(home)
    said = holdfast("trust", home)
    assert said.status == 0
    assert said.out.startswith(f"{home} is trusted")
    assert is_trusted(home)
    assert holdfast("trust", "--list").out == f"{home}\n"
    assert holdfast("trust", "s3://bucket", "--json").json["trusted"] == [home, "s3://bucket"]
    assert holdfast("trust", "--remove", home).status == 0
    assert not is_trusted(home)
    assert holdfast("trust", "--remove", home).status == 2
    assert holdfast("trust").status == 2
    assert holdfast("trust", "--list", home).status == 2
    assert holdfast("trust", "gopher://x").status == 2
