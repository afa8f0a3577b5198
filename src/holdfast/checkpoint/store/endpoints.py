"""Endpoints that the user trusts, and keys for them. No other endpoint of a document receives keys."""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from holdfast.checkpoint.store.address import AZURE, GCS, S3, SCHEMES, Address, parse_address
from holdfast.errors import InvalidInput, Unsupported

VARIABLE = "HOLDFAST_TRUST_ENDPOINTS"
"""Variable that lists endpoints, such as `https://minio.example.com:9000`, separated by commas."""
SET_BY = {
    (S3, "endpoint_url"): ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    (S3, "profile"): ("AWS_PROFILE",),
    (S3, "region"): ("AWS_REGION", "AWS_DEFAULT_REGION"),
    (GCS, "endpoint_url"): ("GOOGLE_BASE_URL",),
    (AZURE, "endpoint_url"): ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    (AZURE, "account"): ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
}
"""Variables in place of the options of a URL that determine its location; the first that is set counts."""
_PORTS = {"http": 80, "https": 443}


def check_endpoint(url: str, document: str, *, own: str = "") -> None:
    """Raise if a document's URL would send keys to an endpoint unknown to the user.

    Paths and URLs of the clouds themselves always pass. `own` is a location that the user has named, whose
    endpoint therefore gets the keys anyway.
    """
    address = _address(url)
    endpoint = _endpoint_with_keys(address)
    if address is None or endpoint is None:
        return
    named = [_endpoint_with_keys(_address(own)) or ""]
    named += [os.environ.get(name, "") for name in SET_BY[address.protocol, "endpoint_url"]]
    named += os.environ.get(VARIABLE, "").split(",")
    if _server(endpoint) in {_server(one.strip()) for one in named if one.strip()}:
        return
    raise InvalidInput(
        f"{document} would send your keys to the endpoint {endpoint}. Nothing was sent. If "
        f"this is your server, set {VARIABLE}={endpoint}. If it needs no "
        "keys, add anonymous=yes to the URL.",
        key=endpoint,
    )


def _address(url: str) -> Address | None:
    scheme, mark, _ = url.partition("://")
    return parse_address(url) if mark and scheme.lower() in SCHEMES else None


def _endpoint_with_keys(address: Address | None) -> str | None:
    """Return the endpoint in a URL if keys would be sent to it."""
    return None if address is None or address.is_on("anonymous") else address.option("endpoint_url")


def with_environment(address: Address) -> Address:
    """Return an address with all options that determine its location, also those from the environment."""
    # The same `s3://BUCKET` is another bucket on another server, in another partition of AWS (by region), and
    # on servers with tenants also under another profile.
    names = [name for protocol, name in SET_BY if protocol == address.protocol]
    facts = dict(address.options) | {name: found for name in names if (found := setting(address, name))}
    if facts.get("endpoint_url"):
        facts.pop("region", None)  # the endpoint decides
    return replace(address, options=tuple(facts.items()))


def setting(address: Address, name: str) -> str | None:
    """Return an option of an address; without it, the setting of the environment in its place."""
    variables = SET_BY.get((address.protocol, name), ())
    found = [address.option(name), *map(os.environ.get, variables)]
    if first := next(filter(None, found), None):
        return first
    if (address.protocol, name) == (S3, "region"):
        return shared_region(setting(address, "profile"))
    if address.protocol == AZURE:
        return connection_settings().get(
            {"endpoint_url": "endpoint", "account": "account_name"}.get(name, "")
        )
    return None


def is_unencrypted(address: Address) -> bool:
    """Return True if the address uses http to another machine."""
    parts = urlsplit(address.option("endpoint_url") or "")
    return parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1")


def connection_settings() -> dict[str, str]:
    """Return the client settings in the environment's connection string of Azure, or {} without one."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    facts = dict(field.split("=", 1) for field in text.split(";") if "=" in field)
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "SharedAccessSignature": "sas_key",
        "BlobEndpoint": "endpoint",
    }
    settings = {ours: facts[theirs] for theirs, ours in names.items() if facts.get(theirs)}
    if "endpoint" not in settings and "EndpointSuffix" in facts and "account_name" in settings:
        suffix = facts["EndpointSuffix"]
        settings["endpoint"] = f"https://{settings['account_name']}.blob.{suffix}"
    return settings


def _server(endpoint: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # the port is not a number, so this matches no server
        return endpoint, "", None


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
    """
    asked = profile or os.environ.get("AWS_PROFILE")
    if not profile and os.environ.get("AWS_ACCESS_KEY_ID"):
        return None
    if not asked and any(map(os.environ.get, _OTHER_SOURCES)):
        return None
    name = asked or "default"
    keys, settings = _section(_keys_path(), name), _section(_config_path(), f"profile {name}", name)
    if "aws_access_key_id" in keys or "aws_access_key_id" in settings:
        return partial(_shared_keys, name)
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


def _shared_keys(profile: str) -> dict[str, Any]:
    """Return the keys of a profile, which may be rotated, and the time to ask again."""
    found = _section(_config_path(), f"profile {profile}", profile) | _section(_keys_path(), profile)
    if not found.get("aws_access_key_id") or not found.get("aws_secret_access_key"):
        raise InvalidInput(f"The profile {profile!r} in {_keys_path()} no longer has keys.")
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
