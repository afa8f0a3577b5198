"""Classification of client errors, and absence of secrets from their text."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.store.client_errors import classify
from holdfast.checkpoint.store.error_codes import ErrorKind

pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")

from obstore import exceptions
from obstore.exceptions import GenericError


def answer(status: int, code: str = "") -> Exception:
    body = f'<?xml version="1.0"?> <Error><Code>{code}</Code><Message>m</Message></Error>' if code else ""
    return GenericError(
        f"Generic S3 error: Error performing PUT http://h/b/k?X-Amz-Signature=HIDE in 1ms - Server returned "
        f"non-2xx status code: {status} X: {body}\n\nDebug source:\nGeneric {{ token: HIDE }}"
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("Object at location k not found"), ErrorKind.ABSENT),
        (exceptions.AlreadyExistsError("k"), ErrorKind.TAKEN),
        (exceptions.PreconditionError("k"), ErrorKind.TAKEN),
        (answer(416), ErrorKind.PAST_END),
        (answer(400), ErrorKind.LASTING),
        (answer(400, "MalformedPolicy"), ErrorKind.MISCONFIGURED),
        (answer(503, "MalformedPolicy"), ErrorKind.PASSING),
        (GenericError("Wanted range\n\nDebug source: InvalidRangeRequest"), ErrorKind.PAST_END),
        (GenericError("Received non-partial response"), ErrorKind.LASTING),
        (answer(429), ErrorKind.PASSING),
        (GenericError("HTTP error: error sending request"), ErrorKind.PASSING),
        (exceptions.PermissionDeniedError("403"), ErrorKind.DENIED),
        (exceptions.UnauthenticatedError("401"), ErrorKind.DENIED),
        (ValueError("Could not parse path"), ErrorKind.NAME),
        (GenericError("Error performing PUT http://169.254.169.254/latest/api/token"), ErrorKind.DENIED),
    ],
)
def test_errors_are_classified(error: Exception, kind: ErrorKind) -> None:
    assert classify(error).kind is kind


@pytest.mark.parametrize(
    "text",
    [
        "GET https://a.blob.core.windows.net/c/k?sv=1&sig=HIDE%3D failed",
        "GET http://h/b/k?X-Amz-Credential=HIDE&X-Amz-Signature=HIDE in 3ms",
        "Authorization: HIDE",
        'token: "HIDE"',
        "secret_access_key=HIDE",
        "x\n\nDebug source:\nHIDE",
    ],
)
def test_no_secret_is_shown(text: str) -> None:
    assert "HIDE" not in classify(GenericError(text)).reason


def test_the_reason_is_one_line_with_the_servers_error_code() -> None:
    reason = classify(answer(503, "SlowDown")).reason
    assert "503" in reason
    assert "SlowDown" in reason
    assert "\n" not in reason
    assert "<" not in reason
