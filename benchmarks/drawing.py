"""Drawings as SVG: texts, lines and bars in the colors of a light or a dark page, in fonts of the reader."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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


class Drawing:
    """An SVG picture that grows element by element. Lengths are in pixels, from the top left corner."""

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
                f"<style>{STYLE}</style>",
                *self._elements,
                "</svg>\n",
            ]
        )
