"""Counts of a campaign: one file per campaign in `campaigns/results`, read by the table of results."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Count:
    """Cases of one kind that a campaign ran, and how many of them failed."""

    kind: str  # such as the parser that was fuzzed, or the workload whose power was cut
    cases: int
    failures: int
    detail: str = ""  # such as "82,381 distinct states"


def write(name: str, counts: list[Count], *, seconds: float, folder: Path = RESULTS) -> Path:
    """Write the counts of one run of campaign `name`, replacing those of its last run.

    Returns:
        The file written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {
        "campaign": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "kernel": platform.release(),
        "seconds": round(seconds, 1),
        "counts": [asdict(count) for count in counts],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def read(path: Path) -> list[Count]:
    """Return the counts in a result file.

    Raises:
        ValueError: the file is not one that `write` has written.
    """
    try:
        return [Count(**count) for count in json.loads(path.read_text())["counts"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no counts of a campaign: {error}") from error


def read_all(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the documents of all campaigns that have been run, by campaign."""
    documents = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return {document["campaign"]: document for document in documents}


def render(folder: Path = RESULTS) -> str:
    """Return the Markdown table of all counts: a line for each kind of each campaign."""
    lines = ["| campaign | kind | cases | failures | | run |", "| --- | --- | --- | --- | --- | --- |"]
    for name, document in read_all(folder).items():
        run = f"{document['date']}, Linux {document['kernel']}"
        for one in document["counts"]:
            cells = _words(name), one["kind"], f"{one['cases']:,}", f"{one['failures']:,}", one["detail"], run
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def render_in_short(folder: Path = RESULTS) -> str:
    """Return the Markdown table of sums: a line for each campaign."""
    lines = ["| campaign | kinds | cases | failures | run |", "| --- | --- | --- | --- | --- |"]
    for name, document in read_all(folder).items():
        found = document["counts"]
        cases, failures = (sum(one[key] for one in found) for key in ("cases", "failures"))
        cells = f"{len(found)} | {cases:,} | {failures:,} | {document['date']}"
        lines.append(f"| {_words(name)} | {cells} |")
    return "\n".join(lines)


def _words(name: str) -> str:
    return name.replace("_", " ")
