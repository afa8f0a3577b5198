"""Parsing of object store URLs, and refusal of secrets in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.store.address import (
    AZURE,
    DEFAULT_PART_BYTES,
    GCS,
    S3,
    Address,
    hide_secrets,
    parse_address,
)
from holdfast.errors import InvalidInput


@pytest.mark.parametrize(
    ("url", "protocol", "bucket", "prefix"),
    [
        ("s3://bucket", S3, "bucket", ""),
        ("s3://bucket/", S3, "bucket", ""),
        ("S3://my.bucket-1/runs/gpt/", S3, "my.bucket-1", "runs/gpt"),
        ("s3a://bucket/a b/%20", S3, "bucket", "a b/%20"),  # letter by letter, as the stores' tools do
        ("gs://bucket/run", GCS, "bucket", "run"),
        ("gcs://bucket/run", GCS, "bucket", "run"),
        ("az://box/run", AZURE, "box", "run"),
        ("azure://box/run", AZURE, "box", "run"),
        ("abfs://box/run", AZURE, "box", "run"),
        ("abfss://box@account1.dfs.core.windows.net/run/x", AZURE, "box", "run/x"),
        ("az://$web", AZURE, "$web", ""),
    ],
)
def test_urls_are_parsed(url: str, protocol: str, bucket: str, prefix: str) -> None:
    address = parse_address(url)
    assert (address.protocol, address.bucket, address.prefix) == (protocol, bucket, prefix)
    assert parse_address(address.url) == address
    assert address.key("a/b") == (f"{prefix}/a/b" if prefix else "a/b")


def test_the_account_of_an_azure_url_is_an_option() -> None:
    address = parse_address("abfss://box@account1.dfs.core.windows.net/run?timeout=5")
    assert address.option("account") == "account1"
    assert address.url == "az://box/run?account=account1&timeout=5"


def test_options_set_limits_and_sizes() -> None:
    address = parse_address(
        "s3://b/p?endpoint_url=http://127.0.0.1:9000&region=eu-west-1&timeout=2m&request_timeout=10"
        "&part_bytes=64MiB&parallel=3&anonymous=yes&virtual_hosted=no"
    )
    assert address.option("endpoint_url") == "http://127.0.0.1:9000"
    assert address.option("region") == "eu-west-1"
    assert (address.timeout_s, address.request_timeout_s) == (120, 10)
    assert (address.part_bytes, address.parallel) == (64 << 20, 3)
    assert address.is_on("anonymous")
    assert not address.is_on("virtual_hosted")
    assert not address.is_on("requester_pays")
    assert address.place == "s3://b/p"
    assert parse_address("s3://b").part_bytes == DEFAULT_PART_BYTES


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://", "does not name a bucket"),
        ("s3:///run", "does not name a bucket"),
        ("s3://b u/run", "does not name a bucket"),
        ("s3://bucket//run", "not a valid object name"),
        ("s3://bucket/a/../b", "not a valid object name"),
        ("s3://bucket?regio=x", "Unknown option 'regio'.*region"),
        ("gs://bucket?region=x", "Unknown option 'region'"),
        ("s3://bucket?region=x&region=y", "twice"),
        ("s3://bucket?endpoint_url=127.0.0.1:9000", "http:// or https://"),
        ("s3://bucket?part_bytes=1MiB", "refuse parts below"),
        ("s3://bucket?part_bytes=many", "part_bytes"),
        ("s3://bucket?parallel=0", "1 to 256"),
        ("s3://bucket?timeout=-1", "timeout"),
        ("s3://bucket?timeout=0", "timeout"),
        ("s3://bucket?checksum=md5", "crc64nvme, sha256, none"),
        ("s3://bucket?anonymous=perhaps", "yes or no"),
    ],
)
def test_invalid_urls_are_refused(url: str, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        parse_address(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:HIDE@bucket/run",
        "s3://HIDE@bucket/run",
        "s3://bucket/run?secret_access_key=HIDE",
        "s3://bucket/run?aws_session_token=HIDE&region=x",
        "s3://bucket/run?endpoint_url=http://user:HIDE@host:1/",
        "az://box/run?sig=HIDE",
        "abfss://box:HIDE@account1.dfs.core.windows.net/run",
    ],
)
def test_secrets_are_refused_and_never_shown(url: str) -> None:
    with pytest.raises(InvalidInput, match="environment variables") as caught:
        parse_address(url)
    assert "HIDE" not in str(caught.value)


def test_a_shown_url_has_neither_password_nor_query() -> None:
    assert hide_secrets("https://user:pw@host/path?sig=x") == "https://...@host/path"
    assert hide_secrets("s3://bucket/run?region=x") == "s3://bucket/run"
    assert hide_secrets("abfss://box@account/run") == "abfss://box@account/run"


WORDS = st.text(st.characters(exclude_characters="/?\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(st.lists(WORDS.filter(lambda word: word not in (".", "..")), max_size=3), st.text("ab-1", max_size=9))
def test_the_url_of_an_address_parses_to_the_same_address(parts: list[str], region: str) -> None:
    url = "/".join(["s3://bucket", *parts]) + "?region=" + region
    try:
        address = parse_address(url)
    except InvalidInput:  # a part too long, or kept for unfinished puts
        return
    assert isinstance(address, Address)
    assert parse_address(address.url) == address
    assert address.prefix == "/".join(parts)
    assert address.option("region") == region
