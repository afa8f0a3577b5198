"""Bar chart of the newest saves of GPT-2 124M: blocked time, time until durable, time to load, as an SVG.

`python benchmarks/chart.py` writes docs/pictures/cost.svg. With --check it changes nothing, and the exit
status is 1 if that file is not the chart of the newest results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from drawing import Drawing
from results import Results, combine

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "cost.svg"
STATE = "gpt2-124m"
CONTESTANTS = {
    "holdfast": "Holdfast",
    "torch-save": "torch.save",
    "safetensors": "safetensors",
    "dcp": "DCP save",
    "dcp-thread": "DCP async_save",
}
PANELS = {
    "blocked_s": "training waits for a save",
    "durable_s": "until the save is durable",
    "load_cold_s": "to load it, from disk",
}
WIDTH, TOP, LINE, PANEL, LEFT, VALUE = 860, 66, 24, 236, 140, 64


def main() -> int:
    """Write the chart, or compare it."""
    from table import RESULTS, newest

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the file with the newest results")
    options = parser.parse_args()
    picture = draw(newest(RESULTS, "saving"))
    if options.check:
        return int(not PICTURE.exists() or picture != PICTURE.read_text())
    PICTURE.write_text(picture)
    return 0


def draw(documents: list[dict[str, Any]]) -> str:
    """Return the chart of saves, newest results first."""
    results, measured = combine(documents)
    names = _found(results)
    drawing = Drawing(WIDTH, TOP + LINE * len(names) + 40, describe(documents))
    for number, (key, title) in enumerate(PANELS.items()):
        left = LEFT + number * PANEL
        drawing.text(left, 34, title, "title")
        seconds = {name: _seconds(results, name, key) for name in names}
        most = max(found for found in seconds.values() if found is not None)
        for row, (name, found) in enumerate(seconds.items()):
            if found is not None:
                y, width = TOP + row * LINE, (PANEL - VALUE - 24) * found / most
                drawing.bar(left, y - 11, width, 14, "ours" if name == "holdfast" else "others")
                drawing.text(left + max(width, 1) + 6, y, _shown(found), "soft")
    for row, name in enumerate(names):
        kind = "title" if name == "holdfast" else ""
        drawing.text(LEFT - 12, TOP + row * LINE, CONTESTANTS[name], kind, anchor="end")
    machine = measured[STATE]["machine"]
    facts = f"{machine['cpu']}, {machine['cores']} cores, {machine['filesystem']}, {machine['date'][:10]}"
    drawing.text(LEFT, TOP + LINE * len(names) + 20, f"GPT-2 124M, 1.49 GB; {facts}", "soft")
    return drawing.svg()


def describe(documents: list[dict[str, Any]]) -> str:
    """Return the chart in words."""
    results, _ = combine(documents)
    sentences = []
    for key, title in PANELS.items():
        found = [
            f"{_shown(seconds)} with {CONTESTANTS[name]}"
            for name in _found(results)
            if (seconds := _seconds(results, name, key)) is not None
        ]
        sentences.append(f"{title}: {', '.join(found)}")
    return "GPT-2 124M with AdamW, 1.49 GB; " + "; ".join(sentences)


def render(documents: list[dict[str, Any]]) -> str:
    """The Markdown of the chart, with its words for those who cannot see it."""
    return f"![{describe(documents)}](docs/pictures/{PICTURE.name})"


def _found(results: Results) -> list[str]:
    return [name for name in CONTESTANTS if _seconds(results, name, "blocked_s") is not None]


def _seconds(results: Results, name: str, key: str) -> float | None:
    spread = results.spread(STATE, name, key)
    return spread and spread.median


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
