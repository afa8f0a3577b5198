"""Files of the page, read once. A request names one of them, and never a path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """File of the page."""

    content: bytes
    kind: str  # media type


def read_page_files() -> dict[str, PageFile]:
    """Return the files of the page by name."""
    folder = resources.files("holdfast.jobs.dash") / "assets"
    return {
        one.name: PageFile(one.read_bytes(), _KINDS[f".{one.name.rpartition('.')[2]}"])
        for one in folder.iterdir()
        if one.is_file()
    }
