"""Makes demo.svg: runs the demo, and draws its failures, its claims and the losses of both trainings.

`python docs/pictures/demo.py` runs the demo and writes demo.json and demo.svg. With --draw it draws demo.json
again; with --check it changes nothing, and the exit status is 1 if demo.svg is not the drawing of demo.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))

from drawing import Drawing  # noqa: E402  # pyright: ignore[reportMissingImports]

FACTS, PICTURE = HERE / "demo.json", HERE / "demo.svg"
STEPS, NUM_BYTES = 192, 100_000_000
WIDTH, LEFT, LINE = 860, 24, 20
PLOT_TOP, PLOT_HEIGHT, PLOT_LEFT, PLOT_WIDTH = 72, 190, 64, 770

Facts = dict[str, Any]


def main() -> int:
    """Run the demo unless its facts are to be drawn again, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw demo.json again")
    parser.add_argument("--check", action="store_true", help="compare demo.svg with demo.json")
    options = parser.parse_args()
    if not (options.draw or options.check):
        FACTS.write_text(json.dumps(run(), indent=1) + "\n")
    picture = draw(json.loads(FACTS.read_text()))
    if options.check:
        return int(picture != PICTURE.read_text())
    PICTURE.write_text(picture)
    return 0


def run() -> Facts:
    """Run the demo, and return its failures, claims and losses."""
    from holdfast.cli.demo.claims import check_claims, find_recoveries
    from holdfast.cli.demo.scenario import Scenario
    from holdfast.cli.demo.screen import Screen

    losses: dict[str, list[tuple[int, float]]] = {"reference": [], "survivor": []}

    class Recorder(Screen):
        """The demo's screen, which also keeps every loss."""

        def show_step(self, name: str, step: int, loss: float) -> None:
            losses[name].append((step, loss))
            super().show_step(name, step, loss)

    with tempfile.TemporaryDirectory(prefix="holdfast-picture-") as folder:
        screen = Recorder(sys.stdout, steps=STEPS, home=folder)
        outcome = Scenario(Path(folder), steps=STEPS, num_bytes=NUM_BYTES, screen=screen).run()
        return {
            "failures": [
                {
                    "what": f"{one.what}, newest damaged" if one.passed_over else one.what,
                    "exit": signal.Signals(-one.status).name if one.status < 0 else f"status {one.status}",
                    "at_step": one.at_step,
                    "restored": one.restored,
                    "steps_lost": one.steps_lost,
                    "restore_s": round(one.restore_s, 3),
                }
                for one in find_recoveries(outcome)
            ],
            "claims": [{"text": one.text, "holds": one.holds} for one in check_claims(outcome)],
            "losses": losses,
        }


def draw(facts: Facts) -> str:
    """Return the picture of a demo."""
    failures = facts["failures"]
    height = PLOT_TOP + PLOT_HEIGHT + 90 + LINE * (len(failures) + len(facts["claims"]))
    drawing = Drawing(WIDTH, height, "holdfast demo: a training that is killed twice and preempted")
    drawing.text(LEFT, 34, "$ holdfast demo", "title")
    _draw_legend(drawing)
    _draw_losses(drawing, facts)
    y = PLOT_TOP + PLOT_HEIGHT + 56
    row = "{:<40}{:>10}{:>9}{:>10}{:>12}{:>14}"
    headings = "FAILURE", "EXIT", "AT STEP", "RESTORED", "STEPS LOST", "RESTORE TOOK"
    drawing.text(LEFT, y, row.format(*headings), "soft")
    for one in failures:
        y += LINE
        cells = one["exit"], one["at_step"], one["restored"], one["steps_lost"], f"{one['restore_s']:.2f} s"
        drawing.text(LEFT, y, row.format(one["what"], *cells))
    y += LINE // 2
    for one in facts["claims"]:
        y += LINE
        drawing.text(LEFT, y, "proven" if one["holds"] else "FAILED", "good" if one["holds"] else "bad")
        drawing.text(LEFT + 64, y, one["text"])
    return drawing.svg()


def _draw_legend(drawing: Drawing) -> None:
    drawing.line(220, 30, 250, 30, "undisturbed")
    drawing.text(258, 34, "loss of an undisturbed run", "soft")
    drawing.line(490, 30, 520, 30, "run")
    drawing.text(528, 34, "killed and resumed", "soft")
    drawing.line(700, 22, 700, 38, "kill")
    drawing.text(708, 34, "a failure", "soft")


def _draw_losses(drawing: Drawing, facts: Facts) -> None:
    """Draw the losses of both runs over the steps. Each start of the killed run is a curve of its own."""
    every = [loss for run in facts["losses"].values() for _, loss in run]
    least, most = min(every), max(every)

    def at(step: float, loss: float) -> tuple[float, float]:
        return (
            PLOT_LEFT + PLOT_WIDTH * step / STEPS,
            PLOT_TOP + PLOT_HEIGHT * (1 - (loss - least) / (most - least)),
        )

    for share in (0.0, 0.5, 1.0):
        loss = least + share * (most - least)
        _, y = at(0, loss)
        drawing.line(PLOT_LEFT, y, PLOT_LEFT + PLOT_WIDTH, y, "grid")
        drawing.text(PLOT_LEFT - 8, y + 4, f"{loss:.1f}", "soft", anchor="end")
    drawing.curve([at(*one) for one in facts["losses"]["reference"]], "undisturbed")
    for one in facts["failures"]:
        x, _ = at(one["at_step"], least)
        drawing.line(x, PLOT_TOP - 8, x, PLOT_TOP + PLOT_HEIGHT, "kill")
        drawing.text(x + 4, PLOT_TOP + 2, one["exit"], "bad")
    start: list[tuple[float, float]] = []
    last = 0
    for step, loss in facts["losses"]["survivor"]:
        if step <= last:
            drawing.curve(start, "run")
            start = []
        start.append(at(step, loss))
        last = step
    drawing.curve(start, "run")
    bottom = PLOT_TOP + PLOT_HEIGHT + 20
    for step in range(0, STEPS + 1, 48):
        anchor = "end" if step == STEPS else "middle"
        drawing.text(at(step, least)[0], bottom, f"step {step}" if step else "0", "soft", anchor=anchor)


if __name__ == "__main__":
    sys.exit(main())
