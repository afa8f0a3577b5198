"""Trust: what covers what, and that only the user can give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.watch.compiled.trust import distrust, file_path, is_trusted, place_of, trust, trusted


@pytest.fixture(autouse=True)
def nobody_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HOLDFAST_TRUST_HOMES", raising=False)


@pytest.mark.parametrize(
    ("prefix", "home", "covers"),
    [
        ("s3://b/runs", "s3://b/runs", True),
        ("s3://b/runs", "s3://b/runs/gpt", True),
        ("s3://b/runs/", "s3a://b/runs/gpt", True),
        ("s3://b", "s3://b/runs", True),
        ("s3://b/runs", "s3://b/runs-of-others", False),
        ("s3://b/runs/gpt", "s3://b/runs", False),
        ("s3://b/runs", "s3://other/runs", False),
        ("s3://b/runs", "gs://b/runs", False),
        ("s3://b/runs", "s3://b/runs?endpoint_url=https://elsewhere.org", False),
        ("s3://b/runs?endpoint_url=https://here.org", "s3://b/runs/x?endpoint_url=https://here.org", True),
        ("s3://b/runs", "s3://b/runs?timeout=5m", True),
        ("az://c/runs?account=me", "az://c/runs?account=you", False),
        ("/runs", "/runs/gpt", True),
        ("/runs", "/runs-of-others", False),
        ("/runs", "/runs/../etc", False),
        ("file:///runs", "/runs/gpt", True),
        ("/runs", "file:///runs/a%20b", True),
        ("/", "/anything", True),
        ("/runs", "s3://b/runs", False),
    ],
)
def test_a_place_covers_homes_inside_it(prefix: str, home: str, covers: bool):
    assert place_of(prefix).covers(place_of(home)) is covers


def test_a_link_does_not_lead_into_a_trusted_folder_from_outside(tmp_path: Path):
    (tmp_path / "trusted").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "trusted" / "link").symlink_to(tmp_path / "elsewhere")
    trust(str(tmp_path / "trusted"))
    assert is_trusted(str(tmp_path / "trusted" / "run"))
    assert not is_trusted(str(tmp_path / "trusted" / "link"))


def test_nothing_is_trusted_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = str(tmp_path / "runs" / "gpt")
    assert not is_trusted(home)
    monkeypatch.setenv("HOLDFAST_TRUST_HOMES", f"s3://bucket , {tmp_path / 'runs'},")
    assert is_trusted(home)
    assert is_trusted("s3://bucket/x")
    monkeypatch.setenv("HOLDFAST_TRUST_HOMES", "")
    assert not is_trusted(home)


def test_the_users_file_keeps_trusted_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert trust("runs") == str(tmp_path / "runs")
    assert trust("s3://bucket/runs") == "s3://bucket/runs"
    trust("runs")
    assert trusted() == ["s3://bucket/runs", str(tmp_path / "runs")]
    assert file_path().stat().st_mode & 0o777 == 0o600
    assert is_trusted(str(tmp_path / "runs" / "gpt"))
    assert distrust("runs")
    assert not distrust("runs")
    assert not is_trusted(str(tmp_path / "runs" / "gpt"))
    assert trusted() == ["s3://bucket/runs"]


def test_a_file_that_other_users_can_write_is_not_read(tmp_path: Path):
    trust(str(tmp_path))
    file_path().chmod(0o666)
    with pytest.raises(InvalidInput, match="other users can write it"):
        is_trusted(str(tmp_path))


@pytest.mark.parametrize("word", ["", "ftp://host/x", "s3://", "memory://x"])
def test_invalid_places_cannot_be_trusted(word: str):
    with pytest.raises(InvalidInput):
        trust(word)
    assert trusted() == []
