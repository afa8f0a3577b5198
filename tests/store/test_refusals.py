"""What a client's error means, and that its text shows no secrets."""

from __future__ import annotations

import pytest

from holdfast.store.refusals import Kind, classify

obstore = pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")


def answer(status: int, code: str = "") -> Exception:
    body = f'<?xml version="1.0"?> <Error><Code>{code}</Code><Message>m</Message></Error>' if code else ""
    return obstore.exceptions.GenericError(
        f"Generic S3 error: Error performing PUT http://h/b/k?X-Amz-Signature=HIDE in 1ms - Server returned "
        f"non-2xx status code: {status} X: {body}\n\nDebug source:\nGeneric {{ token: HIDE }}"
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("Object at location k not found"), Kind.ABSENT),
        (answer(404, "NoSuchBucket"), Kind.NO_BUCKET),
        (answer(404, "ContainerNotFound"), Kind.NO_BUCKET),
        (obstore.exceptions.AlreadyExistsError("k"), Kind.TAKEN),
        (obstore.exceptions.PreconditionError("k"), Kind.TAKEN),
        (answer(409, "ConditionalRequestConflict"), Kind.TAKEN),
        (answer(416, "InvalidRange"), Kind.PAST_END),
        (answer(416), Kind.PAST_END),
        (obstore.exceptions.GenericError("Wanted range\n\nDebug source: InvalidRangeRequest"), Kind.PAST_END),
        (obstore.exceptions.GenericError("Received non-partial response"), Kind.LASTING),
        (answer(500, "InternalError"), Kind.PASSING),
        (answer(503, "SlowDown"), Kind.PASSING),
        (answer(429), Kind.PASSING),
        (answer(400, "RequestTimeout"), Kind.PASSING),
        (answer(400, "BadDigest"), Kind.PASSING),
        (obstore.exceptions.GenericError("HTTP error: error sending request"), Kind.PASSING),
        (obstore.exceptions.PermissionDeniedError("403"), Kind.CREDENTIALS),
        (obstore.exceptions.UnauthenticatedError("401"), Kind.CREDENTIALS),
        (answer(400, "ExpiredToken"), Kind.CREDENTIALS),
        (answer(403, "QuotaExceeded"), Kind.LASTING),
        (answer(400, "EntityTooLarge"), Kind.LASTING),
        (answer(501, "NotImplemented"), Kind.NOT_OFFERED),
        (ValueError("Could not parse path"), Kind.NAME),
        (
            obstore.exceptions.GenericError("Error performing PUT http://169.254.169.254/latest/api/token"),
            Kind.CREDENTIALS,
        ),
    ],
)
def test_errors_are_sorted_by_what_can_be_done(error: Exception, kind: Kind) -> None:
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
    assert "HIDE" not in classify(obstore.exceptions.GenericError(text)).why


def test_the_reason_is_one_line_with_the_servers_own_word() -> None:
    why = classify(answer(503, "SlowDown")).why
    assert "503" in why
    assert "SlowDown" in why
    assert "\n" not in why
    assert "<" not in why
