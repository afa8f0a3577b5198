"""The guarantees of the README: word for word promises of docs/reliability.md, each with its test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def items(document: str, heading: str, mark: str) -> list[str]:
    """Return the items of a list under a heading, each in one line."""
    text = (ROOT / document).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"^{mark} (.*?)(?=^{mark} |\n\n|\Z)", text, re.M | re.S)
    return [" ".join(one.split()) for one in found]


def test_each_guarantee_of_the_readme_is_a_promise_of_the_reliability_page_with_its_test() -> None:
    promised = items("docs/reliability.md", "Promises", r"\d+\.")
    assert len(promised) == 9
    shown = [one.rpartition(" ([test](") for one in items("README.md", "Guarantees", "-")]
    assert len(shown) == 4
    for text, _, link in shown:
        assert text in promised
        assert (ROOT / link.removesuffix("))")).is_file()
