"""Write the tables of the newest results between the markers of a Markdown file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import columns
from goals import judge
from resharded import HEADINGS
from resharded import rows as resharded_rows
from results import Results

RESULTS = Path(__file__).resolve().parent / "results"
TITLES = {
    "gpt2-124m": "GPT-2 124M with AdamW, fp32",
    "gpt2-355m": "GPT-2 355M with AdamW, fp32",
    "small-8000": "8000 tensors of 8 KiB",
}


def main() -> int:
    """Rewrite the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("markdown", type=Path)
    options = parser.parse_args()
    text = options.markdown.read_text()
    for kind, render in RENDERERS.items():
        path = newest(RESULTS, kind)
        if path is None:
            sys.stderr.write(f"No {kind} results in {RESULTS}; run the benchmark first.\n")
            return 1
        text = insert(text, render(json.loads(path.read_text())), kind, what=str(options.markdown))
    options.markdown.write_text(text)
    return 0


def newest(folder: Path, kind: str) -> Path | None:
    """The results file of a kind with the latest date in it; quick runs do not count."""
    dated = []
    for path in folder.glob(f"{kind}_*.json"):
        document = json.loads(path.read_text())
        if not document.get("quick"):
            dated.append((document["machine"]["date"], path))
    return max(dated)[1] if dated else None


def insert(text: str, table: str, kind: str, *, what: str) -> str:
    """`text` with everything between the markers of a kind replaced by `table`.

    Raises:
        ValueError: the markers are not there, each once and on a line of its own, in order.
    """
    begin, end = f"<!-- {kind} -->", f"<!-- /{kind} -->"
    lines = text.splitlines()
    if lines.count(begin) != 1 or lines.count(end) != 1 or lines.index(begin) > lines.index(end):
        message = f"{what} needs the lines {begin} and {end} once each, in this order; nothing was changed."
        raise ValueError(message)
    head, tail = lines[: lines.index(begin) + 1], lines[lines.index(end) :]
    return "\n".join([*head, table, *tail]) + "\n"


def render_resharding(document: dict[str, Any]) -> str:
    """The Markdown of a resharding result: one table, ranks in its columns."""
    facts = f"_{columns.facts(document['machine'], document['rounds'])}_"
    return f"{facts}\n\n" + _table(["", *HEADINGS], resharded_rows(document["runs"]))


def render_saving(document: dict[str, Any]) -> str:
    """The Markdown of a results file: a table for each state, the limits, and the goals."""
    results = Results(tuple(document["runs"]))
    parts = [f"_{columns.facts(document['machine'], document['rounds'])}_"]
    for state in results.states():
        headings = [f"**{TITLES.get(state, state)}**", *(column.heading for column in columns.COLUMNS)]
        parts.append(_table(headings, columns.rows(results, state)))
        parts.append(f"Limits: {columns.limits(results, state)}.")
    verdicts = [list(columns.verdict(found)) for found in judge(results)]
    parts.append(_table(["goal", "bound", "found", ""], verdicts))
    return "\n\n".join(parts)


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


RENDERERS = {"saving": render_saving, "resharding": render_resharding}


if __name__ == "__main__":
    sys.exit(main())
