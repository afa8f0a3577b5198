"""Store factory: opens the store at a path or URL."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import InvalidInput

_ALLOWED = "a path, file:///PATH, memory://NAME, s3://, gs:// or az://BUCKET/PREFIX"
_S3_COMPATIBLE = ("r2", "oss", "cos", "obs", "minio", "b2", "wasabi", "ceph")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SQUASHED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/[^/]")

_shared: dict[str, MemoryStore] = {}
_shared_lock = threading.Lock()


def open_store(place: str | os.PathLike[str]) -> Store:
    """Return the store at a path or URL. Nothing is created before the first put.

    Args:
        place: a path (`~` is expanded in a string), `file:///PATH` (percent-encoded), a prefix of a bucket
            (see `parse_address`), or `memory://NAME`, which is the same store for the
            same name throughout this process. Keys of object stores come from the environment.

    Raises:
        InvalidInput: it is empty, an unknown kind of URL, a URL squashed by `pathlib`, or a path of a file.
        Unsupported: it is in an object store, and the client library is not installed.
        RetryLater: the file system does not answer.
    """
    text = os.fspath(place)
    if not text:
        raise InvalidInput(f"The place for checkpoints is an empty string. Pass {_ALLOWED}.")
    if not isinstance(place, str):
        if squashed := _SQUASHED.match(text):
            raise InvalidInput(
                f"{text!r} looks like a {squashed[1]}:// URL that lost a slash in a pathlib.Path. "
                "Pass it as a string."
            )
        return LocalStore(text)
    if "\0" in text:
        raise InvalidInput(f"{text!r} contains a NUL character, so it is neither a path nor a URL.")
    url = _SCHEME.fullmatch(text)
    return _open_url(url[1].lower(), url[2], text) if url else LocalStore(_expanded(text))


def absolute_place(place: str | os.PathLike[str]) -> str:
    """Return the absolute form of a path. URLs and "" are returned unchanged."""
    text = os.fspath(place)
    if "://" in text or not text:
        return text
    try:
        return str(_expanded(text).resolve())
    except (RuntimeError, OSError, ValueError) as error:  # a loop, a name that is too long, a NUL character
        raise InvalidInput(f"{text!r} is not a path on this machine: {error}") from error


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidInput(f"{text!r} is not a path on this machine: {error}") from error


def _open_url(scheme: str, rest: str, url: str) -> Store:
    if scheme == "file":
        from urllib.parse import unquote  # slow

        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash or not path:
            raise InvalidInput(f"{url!r} is not a file URL of this host. Write file:///ABSOLUTE/PATH.")
        return LocalStore("/" + unquote(path))
    if scheme == "memory":
        if not rest:
            raise InvalidInput(f"{url!r} needs a name, such as memory://test.")
        with _shared_lock:
            return _shared.setdefault(rest, MemoryStore(rest))
    # Slow, so imported only for the URL of a bucket.
    from holdfast.checkpoint.store.address import SCHEMES, hide_secrets

    if scheme in SCHEMES:
        from holdfast.checkpoint.store.bucket import ObjectStore

        return ObjectStore(url)
    shown = hide_secrets(url)
    if scheme in _S3_COMPATIBLE:
        raise InvalidInput(
            f"{shown!r} has an unknown scheme ({scheme}://). Such stores are compatible with S3: use "
            "s3://BUCKET/PREFIX?endpoint_url=https://HOST."
        )
    raise InvalidInput(f"{shown!r} has an unknown scheme ({scheme}://). Pass {_ALLOWED}.")
