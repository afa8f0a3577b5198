"""Addresses of prefixes in object stores, parsed from URLs. URLs with secrets are refused; pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, quote, urlsplit

from msgspec import Struct

from holdfast.checkpoint.store.contract import check_name
from holdfast.errors import InvalidInput
from holdfast.system.units import parse_bytes, parse_duration

S3, GCS, AZURE = "s3", "gs", "az"
SCHEMES = {
    **{"s3": S3, "s3a": S3, "gs": GCS, "gcs": GCS},
    **{"az": AZURE, "azure": AZURE, "abfs": AZURE, "abfss": AZURE},
}
"""URL schemes of object stores, with the protocol of each."""

_FOR_ALL = ("endpoint_url", "anonymous", "timeout", "request_timeout", "part_bytes", "parallel")
_FOR_ONE = {
    S3: ("region", "profile", "virtual_hosted", "checksum", "sse", "sse_kms_key_id", "requester_pays"),
    GCS: (),
    AZURE: ("account",),
}
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")
_CHECKSUMS = ("crc64nvme", "sha256", "none")
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
_AZURE_HOST = re.compile(r"([a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net")
_SECRETS = (
    "Never put keys or tokens in a URL, which ends up in logs and histories. Pass them in environment "
    "variables or files, as for the store's own tools."
)

DEFAULT_PART_BYTES = 16 << 20
MIN_PART_BYTES = 5 << 20  # S3 refuses smaller ones, except for the last
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_REQUEST_TIMEOUT_S = 120.0
DEFAULT_PARALLEL = 8


class Address(Struct, frozen=True):
    """A prefix of a bucket (Azure: a container), and the settings for its requests.

    `protocol` - `S3`, `GCS` or `AZURE`. `scheme` - as written in the URL. `prefix` - without "/" at either
    end; "" is the whole bucket. `options` - names and values of the URL's query, in order; never secrets.
    `timeout_s` - time limit for the retries of one call. `request_timeout_s` - time limit for one request.
    `part_bytes` - the most bytes that one request sends or reads. `parallel` - concurrent requests of one
    call.
    """

    protocol: str
    scheme: str
    bucket: str
    prefix: str = ""
    options: tuple[tuple[str, str], ...] = ()
    timeout_s: float = DEFAULT_TIMEOUT_S
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    part_bytes: int = DEFAULT_PART_BYTES
    parallel: int = DEFAULT_PARALLEL

    @property
    def place(self) -> str:
        """The URL without its options, for messages."""
        return "/".join(filter(None, (f"{self.scheme}://{self.bucket}", self.prefix)))

    @property
    def url(self) -> str:
        """The URL that parses to this address."""
        query = "&".join(f"{name}={quote(value, safe=':/@,')}" for name, value in self.options)
        return f"{self.place}?{query}" if query else self.place

    def overlaps(self, other: Address) -> bool:
        """Return True if both addresses are the same prefix, or one contains the other."""
        mine, theirs = (
            (one.protocol, one.bucket, one.option("endpoint_url"), one.option("account"))
            for one in (self, other)
        )
        shorter, longer = sorted((self.prefix, other.prefix), key=len)
        return mine == theirs and (f"{longer}/".startswith(f"{shorter}/") or not shorter)

    def option(self, name: str) -> str | None:
        """Return the value of an option, or None if the URL does not have it."""
        return dict(self.options).get(name)

    def is_on(self, name: str) -> bool:
        """Return True if a yes-or-no option is set to yes."""
        return (self.option(name) or "no").lower() in _YES

    def key(self, name: str) -> str:
        """Return the bucket key of the object `name`."""
        return f"{self.prefix}/{name}" if self.prefix else name


_MAX_OPTIONS, _MAX_CHARS = 64, 8192


def parse_address(url: str) -> Address:
    """Parse a URL of an object store.

    The URL is `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or
    `abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX`, with options after a "?". The prefix is used
    literally, as by the stores' own tools: percent-escapes are not decoded.
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in SCHEMES or len(url) > _MAX_CHARS:
        raise InvalidInput(
            f"{hide_secrets(url)[:200]!r} is not a URL of an object store. Supported: {', '.join(SCHEMES)}."
        )
    path, _, query = rest.partition("?")
    bucket, _, prefix = path.partition("/")
    protocol = SCHEMES[scheme.lower()]
    options = list(_options(protocol, query))
    if "@" in bucket:
        bucket, account = _split_account(protocol, bucket)
        options = [("account", account), *(option for option in options if option[0] != "account")]
        scheme = "az"  # the short form, with the account as an option
    shown = hide_secrets(url)
    if not _BUCKET.fullmatch(bucket):
        raise InvalidInput(f"{shown!r} does not name a bucket. Write {scheme}://BUCKET/PREFIX.")
    prefix = prefix.rstrip("/")
    if prefix:
        check_name(prefix)
    texts = dict(options)
    return Address(
        protocol,
        scheme.lower(),
        bucket,
        prefix,
        tuple(options),
        timeout_s=_seconds(texts, "timeout", DEFAULT_TIMEOUT_S),
        request_timeout_s=_seconds(texts, "request_timeout", DEFAULT_REQUEST_TIMEOUT_S),
        part_bytes=_part_bytes(texts.get("part_bytes", DEFAULT_PART_BYTES)),
        parallel=_parallel(texts.get("parallel", str(DEFAULT_PARALLEL))),
    )


def hide_secrets(url: str) -> str:
    """Return a URL for messages: without its query, and without a user and password before the host."""
    scheme, mark, rest = url.partition("://")
    head, slash, path = rest.partition("?")[0].partition("/")
    user, at, host = head.rpartition("@")
    return f"{scheme}{mark}{'...' if ':' in user else user}{at}{host}{slash}{path}"


def _options(protocol: str, query: str) -> Iterator[tuple[str, str]]:
    known = (*_FOR_ALL, *_FOR_ONE[protocol])
    seen = set()
    try:
        given = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_OPTIONS)
    except ValueError as error:
        raise InvalidInput(f"The options of the URL cannot be parsed: {error}.") from None
    for name, value in given:
        if name not in known:
            raise InvalidInput(
                f"Unknown option {name!r} of a {protocol}:// URL. Supported: {', '.join(known)}. {_SECRETS}"
            )
        if name in seen:
            raise InvalidInput(f"The URL has the option {name} twice; write it once.")
        seen.add(name)
        yield name, _checked(name, value)


def _checked(name: str, value: str) -> str:
    if name == "endpoint_url":
        try:
            parts = urlsplit(value)
            _ = parts.port
        except ValueError as error:
            raise InvalidInput(f"endpoint_url is not a URL: {error}.") from None
        if parts.username or parts.password or parts.query:
            raise InvalidInput(f"endpoint_url contains more than an address. {_SECRETS}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidInput(f"endpoint_url must be an http:// or https:// URL, got {value!r}.")
    elif name in ("anonymous", "virtual_hosted", "requester_pays"):
        if value.lower() not in (*_YES, *_NO):
            raise InvalidInput(f"{name} must be yes or no, got {value!r}.")
    elif name == "checksum" and value not in _CHECKSUMS:
        raise InvalidInput(f"checksum must be one of {', '.join(_CHECKSUMS)}, got {value!r}.")
    return value


def _split_account(protocol: str, host: str) -> tuple[str, str]:
    """Return the container and account of `CONTAINER@ACCOUNT.dfs.core.windows.net`."""
    container, _, server = host.partition("@")
    found = _AZURE_HOST.fullmatch(server)
    if protocol != AZURE or found is None or ":" in container:
        raise InvalidInput(
            "The URL has an '@' before its first '/', which only "
            f"abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX may have. {_SECRETS}"
        )
    return container, found[1]


def _seconds(texts: dict[str, str], name: str, default: float) -> float:
    text = texts.get(name, str(default))
    is_number = text.replace(".", "", 1).isdecimal()
    return parse_duration(float(text) if is_number else text, f"the URL's option {name}")


def _part_bytes(text: str | int) -> int:
    part_bytes = parse_bytes(text, "the URL's option part_bytes")
    if part_bytes < MIN_PART_BYTES:
        raise InvalidInput(
            f"part_bytes is {part_bytes}; object stores refuse parts below {MIN_PART_BYTES} bytes."
        )
    return part_bytes


def _parallel(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise InvalidInput(f"parallel must be a number from 1 to 256, got {text!r}.")
    return int(text)
