"""Makes report.png: trains the demo's run, reports on it, and takes a picture of the page.

`python docs/pictures/report.py` needs `pip install -e '.[demo,report]'` and a Chromium; with a HOME as its
argument it takes the run that is there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1180, 706  # as far down as the timeline goes


def main() -> None:
    """Make the picture."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is on the PATH")
    with tempfile.TemporaryDirectory(prefix="holdfast-picture-") as folder:
        page = Path(folder, "report.html")
        home = sys.argv[1] if len(sys.argv) > 1 else train(Path(folder))
        holdfast("report", home, "-o", str(page), "--title", "A run with two kills and a preemption")
        photograph(browser, page, Path(folder, "profile"))


def train(folder: Path) -> str:
    """The demo's run: killed while saving, killed between saves and its checkpoint damaged, preempted."""
    holdfast("demo", "--home", str(folder), "--keep")
    return str(next(folder.glob("holdfast-demo-*")) / "survivor")


def holdfast(*words: str) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "holdfast.cli", *words], check=True)


def photograph(browser: str, page: Path, profile: Path) -> None:
    """Have the browser draw the page into report.png."""
    options = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        f"--window-size={WIDTH},{HEIGHT}",
        "--virtual-time-budget=20000",
        f"--screenshot={HERE / 'report.png'}",
    )
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main()
