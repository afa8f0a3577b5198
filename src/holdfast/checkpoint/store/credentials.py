"""AWS keys from the shared credentials file, read again when they may have changed."""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from holdfast.errors import InvalidInput, Unsupported

_READ_AGAIN_AFTER = timedelta(minutes=10)
_OTHER_SOURCES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables that name another source of keys, which the client uses by itself."""

Provider = Callable[[], Any]


def shared_credentials(profile: str | None) -> Provider | None:
    """Return a provider of a `~/.aws` profile's keys. None means that the client finds keys itself.

    The order is that of AWS's own tools: a profile requested by name, then variables with keys, then
    variables that name another source, then the profile `default`, then the machine's role.

    Args:
        profile: as the URL names it, or None for AWS_PROFILE or no profile.

    Raises:
        InvalidInput: the requested profile does not exist.
        Unsupported: its keys come from a login or a program, which needs boto3, and boto3 is not installed.
    """
    asked = profile or os.environ.get("AWS_PROFILE")
    if not profile and os.environ.get("AWS_ACCESS_KEY_ID"):
        return None
    if not asked and any(map(os.environ.get, _OTHER_SOURCES)):
        return None
    name = asked or "default"
    keys, settings = _section(_keys_path(), name), _section(_config_path(), f"profile {name}", name)
    if "aws_access_key_id" in keys or "aws_access_key_id" in settings:
        return SharedKeys(name)
    if settings.keys() & {"sso_session", "sso_start_url", "role_arn", "credential_process"}:
        return _from_boto3(name)
    if asked:
        raise InvalidInput(
            f"The profile {name!r} has no keys in {_keys_path()} or {_config_path()}. Set AWS_PROFILE to "
            "another profile, or unset it."
        )
    return None


def shared_region(profile: str | None) -> str | None:
    """Return the region in the profile's settings, if any."""
    name = profile or os.environ.get("AWS_PROFILE") or "default"
    return _section(_config_path(), f"profile {name}", name).get("region")


class SharedKeys:
    """Provider of a profile's keys, read from the file at each request. They may be rotated."""

    def __init__(self, profile: str) -> None:
        self._profile = profile

    def __call__(self) -> dict[str, Any]:
        """Return the keys, and the time to ask again."""
        found = {
            **_section(_config_path(), f"profile {self._profile}", self._profile),
            **_section(_keys_path(), self._profile),
        }
        if not found.get("aws_access_key_id") or not found.get("aws_secret_access_key"):
            raise InvalidInput(f"The profile {self._profile!r} in {_keys_path()} no longer has keys.")
        return {
            "access_key_id": found["aws_access_key_id"],
            "secret_access_key": found["aws_secret_access_key"],
            "token": found.get("aws_session_token"),
            "expires_at": datetime.now(timezone.utc) + _READ_AGAIN_AFTER,
        }


def _from_boto3(profile: str) -> Provider:
    try:
        import boto3  # pyright: ignore[reportMissingImports]
        from obstore.auth.boto3 import Boto3CredentialProvider  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise Unsupported(
            f"The profile {profile!r} gets its keys from a login, a role or a program, which needs boto3: "
            "pip install boto3. Or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from None
    return Boto3CredentialProvider(boto3.session.Session(profile_name=profile))


def _keys_path() -> Path:
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()


def _config_path() -> Path:
    return Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()


def _section(path: Path, *names: str) -> dict[str, str]:
    """Return the first section with one of these names, or {}."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):  # not shown: it quotes the line, which may be a key
        raise InvalidInput(f"{path} cannot be parsed as a file of AWS profiles.") from None
    return next((dict(parser[name]) for name in names if parser.has_section(name)), {})
