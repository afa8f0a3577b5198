"""Setup of clients from URL and environment, and checks of the process."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from holdfast.checkpoint.store import clients, open_store
from holdfast.checkpoint.store.address import parse_address
from holdfast.errors import InvalidInput, Unsupported
from programs import run_python


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all cloud settings from the environment except the test's own."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")


def settings(url: str) -> Any:
    pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")
    client = clients.Clients(parse_address(url)).get()
    return {**client.config, **(client.client_options or {})}


def test_the_error_for_a_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(Unsupported, match=r"pip install 'torch-holdfast\[remote\]'"):
        open_store("s3://bucket/run")


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    script = "import sys, holdfast, holdfast.checkpoint.store; print('obstore' in sys.modules)"
    assert run_python(script) == "False"


@pytest.mark.parametrize(
    ("options", "unsigned", "checksum", "http"),
    [
        ("", "true", "crc64nvme", "false"),
        ("?endpoint_url=http://127.0.0.1:1", "false", "sha256", "true"),
        ("?checksum=none", "true", None, "false"),
    ],
)
def test_bodies_are_signed_or_hashed(options: str, unsigned: str, checksum: str | None, http: str) -> None:
    """Only the connection of https protects a body that is not signed."""
    found = {name: str(value).lower() for name, value in settings(f"s3://bucket/run{options}").items()}
    facts = found["unsigned_payload"], found.get("checksum_algorithm"), found["allow_http"]
    assert facts == (unsigned, checksum, http)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_the_endpoint_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9000/")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    found = settings("s3://bucket/run")
    assert found["endpoint"] == "http://127.0.0.1:9000"
    assert found["region"] == "eu-west-3"
    assert str(found["allow_http"]).lower() == "true"


def test_the_url_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    found = settings("s3://bucket/run?endpoint_url=https://host&region=us-west-2")
    assert (found["endpoint"], found["region"]) == ("https://host", "us-west-2")
    found = settings("gs://bucket/run?anonymous=yes&endpoint_url=http://127.0.0.1:1")
    assert found["base_url"] == "http://127.0.0.1:1"


def test_azure_accounts_come_from_variables_url_or_connection_string(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="AZURE_STORAGE_ACCOUNT_NAME"):
        settings("az://box/run")
    assert settings("az://box/run?account=acc1")["account_name"] == "acc1"
    assert settings("abfss://box@acc2.dfs.core.windows.net/run")["account_name"] == "acc2"
    text = "AccountName=acc3;AccountKey=a2V5;EndpointSuffix=x.y"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    found = settings("az://box/run")
    assert found["account_name"] == "acc3"
    assert found["endpoint"] == "https://acc3.blob.x.y"


def test_a_setting_that_the_library_refuses_raises_invalid_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "HIDE no base64!")
    with pytest.raises(InvalidInput, match="az://box/run") as caught:
        settings("az://box/run?account=acc1")
    assert "HIDE" not in str(caught.value)


def test_one_client_serves_all_calls_until_it_is_dropped() -> None:
    pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")
    made = clients.Clients(parse_address("s3://bucket/run"))
    assert made.get() is made.get()
    assert made.get() is not made.get(retrying=True)
    before = made.get()
    made.drop()
    assert made.get() is not before
