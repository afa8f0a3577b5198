"""What the uploader has to say to people: lines on its standard error, which `mount` makes a file of."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Write one line, with the time."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} holdfast: {text}\n")
    sys.stderr.flush()
