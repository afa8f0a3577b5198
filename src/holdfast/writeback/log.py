"""Log of the uploader: lines on standard error, which a mount redirects to a file."""

from __future__ import annotations

import sys
import time


def log(text: str) -> None:
    """Write one line with the current time."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} holdfast: {text}\n")
    sys.stderr.flush()
