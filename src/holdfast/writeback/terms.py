"""The terms of an uploader's work: what the mounter tells it once, when it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatch

from holdfast.documents import decode_dataclass
from holdfast.errors import InvalidInput
from holdfast.writeback.claim import check_owner
from holdfast.writeback.journal import FOLDER

EXCLUDED = ("*.tmp", "*.partial", "*.part", ".nfs*", ".unfinished-*", "tmp-checkpoint-*")
"""Names of files that are not finished, by custom; they go to the bucket when they are renamed."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an uploader is to do.

    Args:
        directory: absolute path of the write-back directory.
        place: URL or path of the place its files go to.
        fetch: whether what the place holds is fetched at the start.
        exclude: globs; a file of which any part of the path matches is not uploaded.
        owner: whose mount it is, such as a job; "" for nobody's, whom none can overtake.
        attempt: of the owner, from 1; a newer one takes over, the same one writes beside.
        copy_bytes: files up to this size are kept as copies, so that every version arrives.
        kept_bytes: limit on versions that only the uploader keeps, since the directory has newer ones.
        open_limit_s: how long the order waits for a file that was opened again before it was sent.
        linger_s: after the last holder has gone: how long files that are still open are waited for.
        give_up_s: after the last holder has gone: how long a place that fails is tried.
        until_signal: it is nobody's but a person's, and ends by a signal.
    """

    directory: str
    place: str
    fetch: bool = True
    exclude: tuple[str, ...] = EXCLUDED
    owner: str = ""
    attempt: int = 0
    copy_bytes: int = 4 << 20
    kept_bytes: int = 16 << 30
    open_limit_s: float = 600.0
    linger_s: float = 60.0
    give_up_s: float = 3600.0
    until_signal: bool = False

    def __post_init__(self) -> None:
        check_owner(self.owner, self.attempt)
        if self.copy_bytes < 0 or self.kept_bytes < 0:
            raise InvalidInput("copy_bytes and kept_bytes must not be negative.")

    def skips(self, name: str) -> bool:
        """Whether a name in the directory is none that goes to the place."""
        return skips(name, self.exclude)

    def text(self) -> str:
        """As one line, for `read_terms`."""
        return json.dumps(asdict(self))


def skips(name: str, exclude: tuple[str, ...]) -> bool:
    """Whether a name is our own folder, or a part of it matches one of the globs."""
    parts = name.split("/")
    return parts[0] == FOLDER or any(fnmatch(part, glob) for part in parts for glob in exclude)


def read_terms(text: str) -> Terms:
    """Return the terms that a mounter wrote.

    Raises:
        Corrupt: they are no terms.
        InvalidInput: they cannot be kept.
    """
    return decode_dataclass(Terms, text, "the terms of an uploader", any_text=True)
