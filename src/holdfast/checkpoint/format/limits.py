"""Limits of the format, for reading and writing, and the types of members that have them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.system.documents import Count
from holdfast.system.units import MAX_STEP as MAX_STEP

MAX_DOCUMENT_BYTES = 1 << 30  # bytes of a part, a manifest or an index of compiled files
MAX_SMALL_BYTES = 1 << 20  # bytes of any other sealed document
MAX_LOG_BYTES = 1 << 30  # bytes of one log of the history
MAX_LINE_BYTES = 1 << 20  # bytes of one line of the history
MAX_DEPTH = 256  # maximum nesting of arrays and objects in a document
MAX_VALUE_DEPTH = MAX_DEPTH - 8
"""Maximum nesting of one encoded value, a few levels below the top of its document."""
MAX_RANKS = 1 << 20
MAX_ATTEMPT = 10**9 - 1
MAX_DIMS = 64  # dimensions of a tensor
MAX_TENSOR_BYTES = (1 << 63) - 1  # bytes of a tensor
MAX_SPLITS = 64  # splits of a partitioning by a rule
MAX_SPLIT_DIMS = 8  # dimensions along which a tensor may be split into listed regions
MAX_NAME_CHARS = 1 << 14  # characters of a tensor's name or key
RUN_ID = r"\A[0-9A-Za-z][0-9A-Za-z._-]{0,127}\Z"  # id of a run; safe as part of a file name

RunId = Annotated[str, Meta(pattern=RUN_ID)]
AttemptNumber = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
WorldSize = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, Meta(ge=0, le=MAX_RANKS - 1)]
UnixSeconds = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]  # of a tensor or an object
Sizes = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]  # one for each dimension
Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]  # an xxh3-128 as text
