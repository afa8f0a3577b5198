"""Counts of a campaign: one file per campaign in `campaigns/results`, read by the table of results."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

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
