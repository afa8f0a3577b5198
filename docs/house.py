"""Writes the tree of ARCHITECTURE.md from the first line of every file: `python docs/house.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
BEGIN, END = "```\nsrc/holdfast/\n", "```\n"
WIDTH = 26
TOP = "The public names, imported when they are first used"
"""The package's own first line greets its users."""


def main() -> int:
    """Put the tree into ARCHITECTURE.md; with `--check` only say whether it is there."""
    path = ROOT / "ARCHITECTURE.md"
    text = path.read_text()
    told = with_tree(text)
    if sys.argv[1:] == ["--check"]:
        if told != text:
            sys.stderr.write("The tree of ARCHITECTURE.md is not that of src/holdfast: run docs/house.py.\n")
        return int(told != text)
    path.write_text(told)
    return 0


def with_tree(text: str) -> str:
    """The text with the tree of today."""
    head, found, rest = text.partition(BEGIN)
    if not found:
        raise ValueError(f"ARCHITECTURE.md has no block that begins with {BEGIN!r}")
    _, _, tail = rest.partition(f"\n{END}")
    lines = [_line(0, "__init__.py", TOP), *_lines(PACKAGE, 0)]
    return head + BEGIN + "\n".join(lines) + f"\n{END}" + tail


def _lines(folder: Path, depth: int) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield _line(depth, path.name, _job(path))
    for path in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield _line(depth, f"{path.name}/", _job(path / "__init__.py"))
        yield from _lines(path, depth + 1)


def _line(depth: int, name: str, job: str) -> str:
    return ("  " * (depth + 1) + name).ljust(WIDTH - 1) + " " + job


def _job(path: Path) -> str:
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    if not first:
        raise ValueError(f"{path.relative_to(ROOT)} does not say its job in its first line")
    return first[0].removesuffix(".")


if __name__ == "__main__":
    sys.exit(main())
