"""Drawings as SVG: texts, lines, bars and boxes in colors of light and dark pages, in fonts of the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from typing_extensions import override

STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #24292f; }
.page { fill: #ffffff; stroke: #d0d7de; }
.soft { fill: #6e7781; }
.title { font-weight: 600; }
.good { fill: #1a7f37; }
.bad { fill: #cf222e; }
.grid { stroke: #d8dee4; }
.ours { fill: #0969da; }
.others { fill: #afb8c1; }
.run { stroke: #0969da; fill: none; stroke-width: 1.6; }
.undisturbed { stroke: #afb8c1; fill: none; stroke-width: 6; }
.kill { stroke: #cf222e; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .page { fill: #0d1117; stroke: #30363d; }
  .soft { fill: #8d96a0; }
  .good { fill: #3fb950; }
  .bad { fill: #f85149; }
  .grid { stroke: #262c36; }
  .ours { fill: #4493f8; }
  .others { fill: #57606a; }
  .run { stroke: #4493f8; }
  .undisturbed { stroke: #57606a; }
  .kill { stroke: #f85149; }
}
"""

BOXES = """
.box { fill: #f6f8fa; stroke: #afb8c1; }
.accent { fill: #ddf4ff; stroke: #0969da; }
.fine { fill: #dafbe1; stroke: #1a7f37; }
.harm { fill: #ffebe9; stroke: #cf222e; }
.frame { fill: none; stroke: #6e7781; stroke-dasharray: 5 4; }
.wire { fill: none; stroke: #57606a; stroke-width: 1.4; }
.tip { fill: #57606a; }
.mark { stroke: #6e7781; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  .box { fill: #161b22; stroke: #57606a; }
  .accent { fill: #0c2d53; stroke: #4493f8; }
  .fine { fill: #12361f; stroke: #3fb950; }
  .harm { fill: #4a1416; stroke: #f85149; }
  .frame { stroke: #8d96a0; }
  .wire { stroke: #8d96a0; }
  .tip { fill: #8d96a0; }
  .mark { stroke: #8d96a0; }
}
"""
CHARACTER, LINE = 8.0, 17
"""Room for a character of any reader's font, and the distance between two lines."""


class Drawing:
    """An SVG picture that grows element by element. Lengths are in pixels, from the top left corner."""

    style = STYLE

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._title = title
        self._elements: list[str] = []
        self._add(f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>')

    def _add(self, element: str) -> None:
        self._elements.append(element)

    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> None:
        """Write a line of text whose baseline begins, ends or is centered at a point."""
        self._add(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}" xml:space="preserve">'
            f"{escape(text)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a straight line."""
        self._add(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>')

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        found = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add(f'<polyline points="{found}" class="{kind}"/>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a filled rectangle, at least a pixel wide."""
        self._add(
            f'<rect x="{x:g}" y="{y:g}" width="{max(width, 1):.1f}" height="{height:g}" rx="2" '
            f'class="{kind}"/>'
        )

    def svg(self) -> str:
        """Return the picture as a document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
        )
        return "\n".join(
            [
                head,
                f"<title>{escape(self._title)}</title>",
                f"<style>{self.style}</style>",
                *self._elements,
                "</svg>\n",
            ]
        )


class Diagram(Drawing):
    """A drawing of boxes and arrows. Text that does not fit is an error."""

    style = STYLE + BOXES

    @override
    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> None:
        """Write a line of text; see `Drawing.text`."""
        room = {"start": self.width - x, "end": x, "middle": 2 * min(x, self.width - x)}[anchor]
        _check_room(text, room)
        super().text(x, y, text, kind, anchor=anchor)

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "box") -> None:
        """Draw a box with lines of text in its middle, the first one in bold."""
        self._add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')
        baseline = y + height / 2 + 4.5 - LINE * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            _check_room(line, width)
            self.text(
                x + width / 2, baseline + LINE * number, line, "" if number else "title", anchor="middle"
            )

    def frame(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """Draw a dashed frame around other elements, with a label in its upper left corner."""
        self._add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="frame"/>')
        self.text(x + 12, y + 19, label, "soft")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points with a tip at its end."""
        (x1, y1), (x2, y2) = points[-2:]
        along = math.atan2(y2 - y1, x2 - x1)
        ends = [(x2 - 9 * math.cos(along + turn), y2 - 9 * math.sin(along + turn)) for turn in (0.42, -0.42)]
        base = sum(x for x, _ in ends) / 2, sum(y for _, y in ends) / 2
        self.curve([*points[:-1], base], "wire")
        tip = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x2, y2), *ends))
        self._add(f'<polygon points="{tip}" class="tip"/>')


def _check_room(text: str, room: float) -> None:
    """Raise an error if a text may be wider than its place."""
    if CHARACTER * len(text) > room:
        raise ValueError(f"{text!r} needs {CHARACTER * len(text):g} pixels, and has {room:g}")
