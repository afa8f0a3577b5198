"""Links in the documents: each file, and each heading in it, exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("docs", "benchmarks", "examples", "src", "tests", ".ci")
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))}
)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def without_code(text: str) -> str:
    """`text` without fenced blocks and inline code, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a document, as common renderers make them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(document: Path) -> list[str]:
    """Links of a document that lead nowhere."""
    bad = []
    for link in LINK.findall(without_code(document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            bad.append(link)
    return bad


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_broken(document: Path) -> None:
    assert broken(document) == []


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One Heading: here\n")
    document = tmp_path / "page.md"
    document.write_text(
        "# Top\n[a](there.md) [b](there.md#one-heading-here) [c](#top)\n"
        "[d](gone.md) [e](there.md#no) [f](#no)\n"
        "`[g](code.md)`\n```\n[h](block.md)\n```\n[i](https://example.org)\n"
    )
    assert broken(document) == ["gone.md", "there.md#no", "#no"]
