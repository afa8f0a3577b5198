"""Tables of the reliability campaigns in the documents: they equal what the campaigns have written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns import counts

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("document", "name", "render"),
    [
        ("benchmarks/RESULTS.md", "reliability", counts.render),
        ("docs/reliability.md", "reliability in short", counts.render_in_short),
    ],
)
def test_the_table_is_that_of_the_results(document: str, name: str, render: Callable[[], str]):
    text = (ROOT / document).read_text()
    table = text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
    assert table.strip() == render(), f"run `.venv/bin/python benchmarks/table.py {document}`"


def test_no_campaign_has_failures():
    for name, document in counts.read_all().items():
        assert [row["kind"] for row in document["counts"] if row["failures"]] == [], name
