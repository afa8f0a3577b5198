"""Feed of a job's output for the page: the newest lines first, then those that follow."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from holdfast.errors import InvalidInput, NotFound, printable
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import job_folder, state_dir
from holdfast.jobs.output.log_reader import LogReader, interleaved, texts
from holdfast.system.units import plural

MAX_BYTES = 256 << 10  # output in one response, of all nodes together
MAX_LINES = 2000  # lines in one response
MAX_CHARS = 4000  # characters of a line
_CURSOR = re.compile(r"(?:[0-9]{1,5}:[0-9]{1,16}(?:,(?!$)|$)){0,10000}", re.ASCII)
# Colours and cursor movements of terminals, and titles of their windows.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)|[@-Z\\-_])")
_MIN_BYTES = 4 << 10
_MAX_LINE_BYTES = 64 << 10


def output_page(job: Job, *, cursor: str, node: str) -> dict[str, Any]:
    """Return new lines of a job as JSON, with the cursor of the next request. Too many: only the newest.

    An empty cursor stands for the newest lines, and an empty node for all nodes.
    """
    if not _CURSOR.fullmatch(cursor):
        raise InvalidInput("The cursor of an earlier response was expected.")
    pairs = (one.split(":") for one in cursor.split(",") if one)
    offsets = {int(rank): int(offset) for rank, offset in pairs}
    folder, ranks = job_folder(state_dir(), job.id), _ranks(job, node)
    share = max(_MIN_BYTES, MAX_BYTES // max(1, len(ranks)))
    skipped_bytes = 0
    readers: list[LogReader] = []
    for rank in ranks:
        begin, end, skipped = _bounds(folder.log(rank), offsets.get(rank, 0), share)
        skipped_bytes += skipped
        readers.append(LogReader(folder.log(rank), rank, is_timed=True, begin=begin, end=end))
    lines = [
        {"node": block.node, "unix_s": block.unix_s, "text": plain_text(text)}
        for block in interleaved(readers, is_end=job.status.is_final)
        for text in texts(block)
    ]
    return {
        "lines": lines[-MAX_LINES:],
        "cursor": ",".join(f"{reader.node}:{reader.offset}" for reader in readers),
        "progress": [
            {"node": reader.node, "text": plain_text(reader.progress.decode("utf-8", "replace"))}
            for reader in readers
            if reader.progress
        ],
        "skipped_bytes": skipped_bytes,
        "skipped_lines": max(0, len(lines) - MAX_LINES),
        "is_end": job.status.is_final,
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


def _bounds(path: Path, offset: int, max_bytes: int) -> tuple[int, int, int]:
    """Return begin and end of the part to read, and the bytes skipped."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return 0, 0, 0
    with file:
        size = os.fstat(file.fileno()).st_size
        if offset > size:  # emptied by its owner
            offset = 0
        if size - offset <= max_bytes:
            return offset, size, 0
        # From the next line on, or within a very long one. Without a line break, `find` returns -1.
        begin = size - max_bytes
        begin += max(0, os.pread(file.fileno(), _MAX_LINE_BYTES, begin - 1).find(b"\n"))
        return begin, size, begin - offset
