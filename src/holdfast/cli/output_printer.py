"""Printer of a job's output: with nodes and times or as JSON, and with progress bars on a terminal."""

from __future__ import annotations

import json
import shutil
import sys

from holdfast.jobs.output.block import OutputBlock, format_second, texts, with_prefix

_ERASE = b"\r\x1b[K"
_ENCODER = json.JSONEncoder(ensure_ascii=False)


class OutputPrinter:
    """Printer to standard output. Changes of the job's status go to standard error.

    Args:
        is_labelled: write the node before each line.
        has_times: write the time before each line.
        is_json: write an object per line.
    """

    def __init__(self, *, is_labelled: bool, has_times: bool, is_json: bool) -> None:
        self._is_labelled, self._has_times, self._is_json = is_labelled, has_times, is_json
        self._out = sys.stdout.buffer
        self._node: int | None = None
        self._is_line_start = True
        self._has_progress = False

    def print(self, block: OutputBlock) -> None:
        """Print a block."""
        if self._is_json:
            self._print_json(block)
        elif block.node is None:
            self.flush()
            for text in texts(block):
                print(f"holdfast: {text}", file=sys.stderr, flush=True)
        elif block.is_progress:
            self._print_progress(block)
        else:
            self._print_lines(block)

    def flush(self) -> None:
        """Pass on all that was printed."""
        sys.stdout.flush()

    def close(self) -> None:
        """End an incomplete line, and pass on all that was printed."""
        if self._has_progress:
            self._out.write(_ERASE)
        elif not self._is_line_start:
            self._out.write(b"\n")
        self._has_progress, self._is_line_start = False, True
        self.flush()

    def _print_lines(self, block: OutputBlock) -> None:
        if self._has_progress:
            self._out.write(_ERASE)
            self._has_progress = False
        if block.node != self._node and not self._is_line_start:
            self._out.write(b"\n")
            self._is_line_start = True
        self._node = block.node
        self._out.write(with_prefix(block.data, self._prefix(block), is_line_start=self._is_line_start))
        self._is_line_start = block.data.endswith(b"\n")

    def _print_progress(self, block: OutputBlock) -> None:
        """Write the present text of a line over the one before, cut to the terminal."""
        text = (self._prefix(block) + block.data).decode("utf-8", "replace")
        self._out.write(_ERASE + text[: shutil.get_terminal_size().columns - 1].encode())
        self._has_progress = True
        self.flush()

    def _prefix(self, block: OutputBlock) -> bytes:
        moment = f"{format_second(block.unix_s)} " if self._has_times else ""
        node = f"(node {block.node}) " if self._is_labelled else ""
        return (moment + node).encode()

    def _print_json(self, block: OutputBlock) -> None:
        before = f'{{"node": {json.dumps(block.node)}, "line": '
        after = f', "unix_s": {json.dumps(block.unix_s)}}}\n'
        # One write per block: a log may have millions of lines.
        sys.stdout.write("".join(before + _ENCODER.encode(text) + after for text in texts(block)))
