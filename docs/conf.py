"""Configuration of the documentation site: `make docs-site` builds it from the pages of the repository.

The pages are read where they lie, so a link between two of them is the same link on the site and in the
repository. Links to other files go to REPOSITORY if it is set; until then their text remains without a link.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
_SETTING = re.search(r'^repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
REPOSITORY = f"{_SETTING[1]}/blob/main" if _SETTING and _SETTING[1] else ""
"""Address of the files of the repository on the web; empty until pyproject.toml names the repository."""

GUIDES = (
    *("save", "train-by-epochs", "shuffle-and-resume", "change-a-resumed-run"),
    *("change-ranks", "use-a-bucket", "handle-preemption"),
    *("failed-saves", "start-again-at-once", "survive-a-lost-host", "continue-on-fewer-hosts"),
    *("find-a-hang", "survive-a-loss-spike", "find-wrong-numbers"),
    *("look-inside", "read-a-report"),
    *("launch-a-job", "run-on-slurm-and-clouds"),
    *("find-the-batch", "should-i-compile", "shard-a-model"),
)
"""Pages of docs/how-to in the order that a newcomer needs, one line per group of docs/index.md."""
SHELVES = {
    "Start": ["docs/tutorial", "docs/why", "docs/gallery", "docs/questions", "docs/glossary"],
    "Concepts": [
        "docs/concepts/processes-and-tiers",
        "docs/concepts/life-of-a-save",
        "docs/concepts/life-of-a-restore",
        "docs/concepts/ranks",
        "docs/concepts/peers",
        "docs/concepts/watches",
        "docs/concepts/trust",
    ],
    "Guides": [f"docs/how-to/{name}" for name in GUIDES],
    "Coming from": [
        *(f"docs/coming-from/{page}" for page in ("torch-save", "dcp", "lightning", "trainer")),
        "docs/coming-from/*",
        "docs/how-to/run-under-ray",
    ],
    "Examples": ["examples/README", "examples/*/README"],
    "Reference": [
        *("docs/reference", "docs/cli", "docs/settings", "docs/errors"),
        *("docs/how-to/choose-the-state", "docs/stores", "docs/report"),
        *("docs/jobs", "docs/engines", "docs/write-back", "docs/format", "docs/interpreter-tricks"),
    ],
    "Evidence": ["benchmarks/RESULTS", "benchmarks/README", "docs/reliability", "docs/limits", "SECURITY"],
    "Inside": [
        "ARCHITECTURE",
        "CONTRIBUTING",
        "CODE_OF_CONDUCT",
        "docs/how-to/write-a-watch",
        "docs/design/README",
        "docs/design/0*",
        "CHANGELOG",
    ],
}

project = "Holdfast"
root_doc = "docs/index"
include_patterns = [
    f"{page}.md" for page in ("docs/index", *(one for shelf in SHELVES.values() for one in shelf))
]
extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "Holdfast"
html_copy_source = False
html_show_sphinx = False

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_MENU = "\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Register the hooks."""
    app.connect("source-read", _adapt)
    app.connect("build-finished", _write_front)


def _adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links out of the site to the repository, and give the front page its menu."""
    folder = (ROOT / page).parent

    def adapted(link: re.Match[str]) -> str:
        is_picture, text, target, anchor = link.groups()
        if is_picture or ":" in target:
            return link[0]
        path = (folder / target).resolve()
        if path.suffix == ".md" and str(path.relative_to(ROOT).with_suffix("")) in app.env.found_docs:
            return link[0]
        return f"[{text}]({REPOSITORY}/{path.relative_to(ROOT)}{anchor or ''})" if REPOSITORY else text

    source[0] = _LINK.sub(adapted, source[0])
    if page == root_doc:
        for caption, pages in SHELVES.items():
            source[0] += _MENU.format(caption=caption, pages="\n".join(f"/{one}" for one in pages))


def _write_front(app: Sphinx, error: Exception | None) -> None:
    """Forward the address of the site to its front page."""
    if error is None:
        forward = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html>{forward}<title>Holdfast</title>\n")
