"""A headless browser, if this machine has one, for tests of the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Loaded:
    """A page after its scripts have run."""

    text: str  # its elements as HTML
    console: str  # what the page's scripts have said, warnings and errors among it

    def data(self, name: str) -> str | None:
        """Return a data attribute of the page's body."""
        found = re.search(rf'<body[^>]* data-{name}="([^"]*)"', self.text)
        return found[1] if found else None


def find_browser() -> str | None:
    """Return the path of a Chromium, if any."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def load(browser: str, page: Path, profile: Path) -> Loaded:
    """Load a file and wait for its scripts."""
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={profile}",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    # The browser itself has much to say about a machine without a desktop.
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Loaded(done.stdout, "\n".join(console))
