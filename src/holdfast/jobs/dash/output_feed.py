"""Feed of a job's output for the page: the newest lines first, then those that follow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from holdfast.errors import InvalidInput, NotFound, printable
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import job_folder
from holdfast.jobs.output.block import OutputBlock, texts
from holdfast.jobs.output.log_window import read_window
from holdfast.jobs.state_folder import state_dir
from holdfast.system.units import plural

MAX_BYTES = 256 << 10
"""Output in one response, of all nodes together."""
MAX_LINES = 2000
"""Lines in one response."""
MAX_CHARS = 4000
"""Characters of a line."""
_CURSOR = re.compile(r"(?:[0-9]{1,5}:[0-9]{1,16}(?:,(?!$)|$)){0,10000}", re.ASCII)
# Colours and cursor movements of terminals, and titles of their windows.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)|[@-Z\\-_])")


def output_page(job: Job, *, cursor: str, node: str) -> dict[str, Any]:
    """Return new lines of a job as JSON, with the cursor of the next request.

    Args:
        job: the job.
        cursor: that of the response before, or "" for the newest lines.
        node: the only node to show, or "" for all.

    Raises:
        InvalidInput: the cursor or the node is not a valid one.
        NotFound: the job does not have the node.
    """
    ranks = _ranks(job, node)
    folder = job_folder(state_dir(), job.id)
    is_end = job.status.is_final
    window = read_window(
        {rank: folder.log(rank) for rank in ranks}, _offsets(cursor), max_bytes=MAX_BYTES, is_end=is_end
    )
    lines = [line for block in window.blocks for line in _lines(block)]
    return {
        "lines": lines[-MAX_LINES:],
        "cursor": ",".join(f"{rank}:{offset}" for rank, offset in window.offsets.items()),
        "progress": [
            {"node": rank, "text": plain_text(text.decode("utf-8", "replace"))}
            for rank, text in window.progress.items()
        ],
        "skipped_bytes": window.skipped_bytes,
        "skipped_lines": max(0, len(lines) - MAX_LINES),
        "is_end": is_end,
    }


def plain_text(text: str) -> str:
    """Return a line without a terminal's colours, with control characters escaped, and shortened."""
    text = printable(_SEQUENCE.sub("", text))
    left_out = len(text) - MAX_CHARS
    return text if left_out <= 0 else f"{text[:MAX_CHARS]}... ({plural(left_out, 'character')} more)"


def _ranks(job: Job, node: str) -> range:
    if not node:
        return range(job.num_nodes)
    if not re.fullmatch(r"[0-9]{1,5}", node, re.ASCII):
        raise InvalidInput("The number of a node was expected.")
    if int(node) >= job.num_nodes:
        raise NotFound(f"Job {job.id} has {plural(job.num_nodes, 'node')}, counted from 0.")
    return range(int(node), int(node) + 1)


def _offsets(cursor: str) -> dict[int, int]:
    if not _CURSOR.fullmatch(cursor):
        raise InvalidInput("The cursor of an earlier response was expected.")
    pairs = (one.split(":") for one in cursor.split(",") if one)
    return {int(rank): int(offset) for rank, offset in pairs}


def _lines(block: OutputBlock) -> Iterator[dict[str, Any]]:
    for text in texts(block):
        yield {"node": block.node, "unix_s": block.unix_s, "text": plain_text(text)}
