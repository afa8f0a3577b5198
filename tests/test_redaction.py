"""Messages show neither secrets nor control characters, wherever they come from."""

from __future__ import annotations

import time

import pytest

import holdfast
from holdfast.checkpoint.store import open_store
from holdfast.errors import InvalidInput, printable, redact

SECRET = "hunter2-S3cret/x+y=="


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("GET https://me:{}@host/path failed", "host/path failed"),
        ("clone https://{}@github.com/a/b", "github.com/a/b"),
        ("AWS_ENDPOINT_URL=http://u:{}@10.0.0.1:9000 refused", "10.0.0.1:9000 refused"),
        ("file://user:{}@/data", "/data"),
        ("ssh://git:{}@host/x", "host/x"),
        ("Authorization: Bearer {}", "Authorization: ..."),
        ('headers {{"authorization": "Bearer {}"}}', "headers"),
        ("Authorization=AWS4-HMAC-SHA256 {}", "Authorization"),
        ("sent Bearer {} to", "sent Bearer ... to"),
        ("https://h/c?sv=1&sig={}&se=2", "sv=1"),
        ("https://h/c?X-Amz-Signature={}&X-Amz-Date=1", "https://h/c"),
        ("https://h/c?x-amz-security-token={}", "https://h/c"),
        ("AccountKey={};EndpointSuffix=core", "EndpointSuffix=core"),
        ("AWS_SECRET_ACCESS_KEY={} is wrong", "is wrong"),
        ("access_token={}", "access_token=..."),
    ],
)
def test_secrets_are_left_out_of_every_error(text: str, kept: str) -> None:
    secret = SECRET.replace("/", "") if "@" in text else SECRET
    message = str(InvalidInput(text.format(secret)))
    assert "hunter2" not in message
    assert "S3cret" not in message
    assert kept in message


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run?endpoint_url=https://minio:9000&region=eu&sse_kms_key_id=1234",
        "abfss://container@account.dfs.core.windows.net/run is gone",
        "Give keys by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        "task.yaml:3: secrets.TOKEN: expected text, found 7",
        "git@github.com:a/b and basic authentication",
        "step=5 tokens=9",
    ],
)
def test_text_that_is_not_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_a_place_with_a_password_does_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(holdfast.HoldfastError) as caught:
        open_store("file://user:hunter2@/data")
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    pytest.importorskip("obstore")
    with pytest.raises(holdfast.HoldfastError) as caught:
        open_store("s3://bucket/run?timeout=0.1s&region=x").get("a")
    assert "hunter2" not in str(caught.value)


def test_control_characters_become_escapes() -> None:
    hostile = "a\x1b]0;title\x07b\x9bc\rd\u202ee\x00"
    assert printable(hostile) == "a\\x1b]0;title\\x07b\\x9bc\\x0dd\\u202ee\\x00"
    assert printable("tab\tline\nü 漢字 🙂") == "tab\tline\nü 漢字 🙂"
    assert "\x1b" not in str(InvalidInput(hostile))


def test_long_messages_are_redacted_quickly() -> None:
    began = time.process_time()
    long = (
        "a" * 200_000,
        "://" * 60_000,
        "https://" + ":" * 200_000,
        "token" * 40_000 + "=",
        "x-amz-" * 30_000,
    )
    for text in long:
        printable(redact(text + "="))
    assert time.process_time() - began < 30
