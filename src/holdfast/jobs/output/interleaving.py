"""Interleaving of several nodes' output by time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from holdfast.jobs.output.block import OutputBlock
from holdfast.jobs.output.log_reader import LogReader


def interleaved(readers: Mapping[int | None, LogReader], *, is_end: bool) -> Iterator[OutputBlock]:
    """Yield the new blocks of all nodes in the order of their times.

    Args:
        is_end: no more output follows.
    """
    streams = [_blocks(node, reader, is_end=is_end) for node, reader in readers.items()]
    if len(streams) == 1:
        yield from streams[0]
    else:
        yield from heapq.merge(*streams, key=lambda block: block.unix_s or 0.0)


def _blocks(node: int | None, reader: LogReader, *, is_end: bool) -> Iterator[OutputBlock]:
    for data, unix_s in reader.blocks(is_end=is_end):
        yield OutputBlock(node, data, unix_s)
