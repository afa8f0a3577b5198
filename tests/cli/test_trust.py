"""`holdfast trust` changes the list that trainings read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.watch.compiled.trust import is_trusted

if TYPE_CHECKING:
    from cli.conftest import Command


def test_a_home_is_trusted_listed_and_removed(
    holdfast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    home = str(tmp_path / "runs")
    missing = holdfast("trust", home)
    assert (missing.status, is_trusted(home)) == (2, False)
    (tmp_path / "runs").mkdir()
    assert f"Did you mean {home}?" in holdfast("trust", f"{home}x").err
    result = holdfast("trust", home)
    assert result.status == 0
    assert result.out.startswith(f"{home} is trusted")
    assert is_trusted(home)
    assert holdfast("trust", "--list").out == f"{home}\n"
    assert holdfast("trust", "s3://bucket", "--json").json["trusted"] == [home, "s3://bucket"]
    assert holdfast("trust", "--remove", home).status == 0
    assert not is_trusted(home)
    assert holdfast("trust", "--remove", home).status == 2
    assert holdfast("trust").status == 2
    assert holdfast("trust", "--list", home).status == 2
    assert holdfast("trust", "gopher://x").status == 2


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Clear the variables that name servers, and the list."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)  # also those of a server that an earlier test has started
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    return monkeypatch


DECIDING = {
    "AWS_ENDPOINT_URL": "https://minio.example.com",
    "AWS_ENDPOINT_URL_S3": "https://minio.example.com",
    "AWS_ENDPOINT": "https://minio.example.com",
    "AWS_PROFILE": "other",
    "AWS_REGION": "cn-north-1",
    "AWS_DEFAULT_REGION": "us-gov-west-1",
    "GOOGLE_BASE_URL": "https://gcs.example.com",
    "AZURE_STORAGE_ENDPOINT": "https://azure.example.com",
    "AZURE_STORAGE_ACCOUNT": "other",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=x;AccountKey=a2V5;BlobEndpoint=https://b.example.com",
}


@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize("name", list(DECIDING))
def test_a_bucket_is_trusted_only_on_the_same_server_and_account(
    holdfast: Command, nowhere: pytest.MonkeyPatch, name: str, by_variable: bool
):
    home = {"GOO": "gs://bucket/runs", "AZU": "az://bucket/runs"}.get(name[:3], "s3://bucket/runs")
    if by_variable:
        nowhere.setenv("HOLDFAST_TRUST_HOMES", home)
    else:
        assert holdfast("trust", home).status == 0
    assert is_trusted(f"{home}/gpt")
    with nowhere.context() as elsewhere:
        elsewhere.setenv(name, DECIDING[name])
        assert not is_trusted(f"{home}/gpt")
        assert holdfast("trust", home).status == 0
        assert is_trusted(f"{home}/gpt")
        assert holdfast("trust", "--remove", home).status == 0
        assert not is_trusted(f"{home}/gpt")


def test_a_trusted_bucket_keeps_the_server_of_the_environment(holdfast: Command, nowhere: pytest.MonkeyPatch):
    nowhere.setenv("AWS_ENDPOINT_URL", "https://minio.example.com/")
    assert holdfast("trust", "s3://bucket/runs").status == 0
    assert "endpoint_url=https://minio.example.com" in holdfast("trust", "--list").out
    nowhere.delenv("AWS_ENDPOINT_URL")
    assert not is_trusted("s3://bucket/runs")
    assert is_trusted("s3://bucket/runs?endpoint_url=https://minio.example.com")


def test_the_region_of_a_profile_counts(holdfast: Command, nowhere: pytest.MonkeyPatch, tmp_path: Path):
    assert holdfast("trust", "s3://bucket?region=eu-west-1").status == 0
    assert not is_trusted("s3://bucket")
    (tmp_path / "aws-config").write_text("[default]\nregion = eu-west-1\n")
    assert is_trusted("s3://bucket")
    nowhere.setenv("AWS_REGION", "us-east-2")
    assert not is_trusted("s3://bucket")


@pytest.mark.parametrize("by_environment", [False, True])
def test_code_over_http_from_another_machine_requires_allow_http(
    holdfast: Command, nowhere: pytest.MonkeyPatch, by_environment: bool
):
    endpoint, home = "http://minio.example.com:9000", "s3://bucket/runs"
    if by_environment:
        nowhere.setenv("AWS_ENDPOINT_URL", endpoint)
    else:
        home = f"{home}?endpoint_url={endpoint}"
    holdfast("trust", home).refused("--allow-http")
    assert not is_trusted(home)
    assert holdfast("trust", home, "--allow-http").status == 0
    assert is_trusted(home)
    assert holdfast("trust", "s3://bucket/near?endpoint_url=http://127.0.0.1:9000").status == 0
