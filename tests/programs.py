"""Python programs that tests run to their end in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

LIMIT_S = 600


def run_python(code: str, *arguments: object, env: Mapping[str, str] | None = None) -> str:
    """Run code without its warnings to its end, which must be a success; return its standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
