"""Write the table of the newest results file between the bench markers of a Markdown file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import columns
from goals import judge
from results import Results

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
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
    parser.add_argument("--results", type=Path, help="default: the newest in benchmarks/results")
    options = parser.parse_args()
    path = options.results or newest(RESULTS)
    if path is None:
        sys.stderr.write(f"No results in {RESULTS}; run benchmarks/run.py first.\n")
        return 1
    document = json.loads(path.read_text())
    text = options.markdown.read_text()
    options.markdown.write_text(insert(text, render(document), what=str(options.markdown)))
    return 0


def newest(folder: Path) -> Path | None:
    """The results file with the latest date in it; quick runs do not count."""
    dated = []
    for path in folder.glob("*.json"):
        document = json.loads(path.read_text())
        if "runs" in document and not document.get("quick"):
            dated.append((document["machine"]["date"], path))
    return max(dated)[1] if dated else None


def insert(text: str, table: str, *, what: str) -> str:
    """`text` with everything between the markers replaced by `table`.

    Raises:
        ValueError: the markers are not there, each once and on a line of its own, in order.
    """
    lines = text.splitlines()
    if lines.count(BEGIN) != 1 or lines.count(END) != 1 or lines.index(BEGIN) > lines.index(END):
        message = f"{what} needs the lines {BEGIN} and {END} once each, in this order; nothing was changed."
        raise ValueError(message)
    head, tail = lines[: lines.index(BEGIN) + 1], lines[lines.index(END) :]
    return "\n".join([*head, table, *tail]) + "\n"


def render(document: dict[str, Any]) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
