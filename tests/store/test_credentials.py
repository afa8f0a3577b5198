"""Sources of AWS keys, in the order of AWS's own tools."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.store.endpoints import shared_credentials, shared_region
from holdfast.errors import InvalidInput, Unsupported

VARIABLES = ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for both files, and remove AWS variables from the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


def write(path: Path, section: str, **values: str) -> None:
    lines = "".join(f"{name} = {value}\n" for name, value in values.items())
    with path.open("a") as file:
        file.write(f"[{section}]\n{lines}")


def provider() -> Callable[[], Any]:
    found = shared_credentials(None)
    assert found is not None
    return found


KEYS = {"aws_access_key_id": "K", "aws_secret_access_key": "S%"}


def test_without_files_the_client_finds_keys_by_itself() -> None:
    assert shared_credentials(None) is None
    assert shared_region(None) is None


def test_the_default_profile_is_used(files: Path) -> None:
    write(files / "credentials", "default", **KEYS, aws_session_token="T")
    found = provider()()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("K", "S%", "T")
    assert found["expires_at"].tzinfo is not None


def test_keys_are_read_again_each_time(files: Path) -> None:
    write(files / "credentials", "default", **KEYS)
    read = provider()
    (files / "credentials").unlink()
    with pytest.raises(InvalidInput, match="no longer has keys"):
        read()
    write(files / "credentials", "default", aws_access_key_id="K2", aws_secret_access_key="S2")
    assert read()["access_key_id"] == "K2"


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"])
def test_variables_precede_default_profiles(files: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write(files / "credentials", "default", **KEYS)
    monkeypatch.setenv(name, "x")
    assert shared_credentials(None) is None


def test_a_requested_profile_precedes_other_sources(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files / "credentials", "work", **KEYS)
    write(files / "config", "profile work", region="eu-north-1")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "x")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert provider()()["access_key_id"] == "K"
    assert shared_region(None) == "eu-north-1"
    monkeypatch.delenv("AWS_PROFILE")
    assert shared_credentials("work") is not None
    assert shared_region("work") == "eu-north-1"


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(InvalidInput, match="profile 'nobody'"):
        shared_credentials("nobody")


def test_a_profile_with_a_login_needs_boto3(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    write(files / "config", "profile work", sso_session="x")
    with pytest.raises(Unsupported, match="pip install boto3"):
        shared_credentials("work")


def test_the_error_for_a_broken_file_does_not_show_its_lines(files: Path) -> None:
    (files / "credentials").write_text("HIDE-this-is-no-section\n")
    with pytest.raises(InvalidInput, match="cannot be parsed") as caught:
        shared_credentials(None)
    assert "HIDE" not in str(caught.value)
