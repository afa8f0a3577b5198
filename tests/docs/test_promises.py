"""The promises of the README: word for word those that docs/reliability.md proves."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def promises(document: str, heading: str) -> list[str]:
    """Return the numbered promises under a heading, each in one line."""
    text = (ROOT / document).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\d+\. (.*?)(?=^\d+\. |\n\n|\Z)", text, re.M | re.S)
    return [" ".join(one.split()) for one in found]


def test_readme_has_the_promises_of_the_reliability_page() -> None:
    shown = promises("docs/reliability.md", "Promises")
    assert len(shown) >= 9
    assert promises("README.md", "Guarantees") == shown
