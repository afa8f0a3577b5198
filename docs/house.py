"""Tree of folders in ARCHITECTURE.md, generated from first lines: `python docs/house.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
DOCUMENT = ROOT / "ARCHITECTURE.md"
BEGIN, END = "```\nsrc/holdfast/\n", "```\n"
WIDTH = 26
TOP = "The public names, imported when they are first used"
"""The package's own first line greets its users."""


def main() -> int:
    """Write the tree into the document; with `--check` only compare it."""
    text = DOCUMENT.read_text()
    generated = with_tree(text)
    if generated == text:
        return 0
    if sys.argv[1:] == ["--check"]:
        sys.stderr.write("The tree of ARCHITECTURE.md is not that of src/holdfast: run docs/house.py.\n")
        return 1
    DOCUMENT.write_text(generated)
    return 0


def with_tree(text: str) -> str:
    """Return a document with the tree of today."""
    head, found, rest = text.partition(BEGIN)
    if not found:
        raise ValueError(f"the document has no block that begins with {BEGIN!r}")
    _, _, tail = rest.partition(f"\n{END}")
    lines = [_line(0, "__init__.py", TOP), *_lines(PACKAGE, 0)]
    return head + BEGIN + "\n".join(lines) + f"\n{END}" + tail


def _lines(folder: Path, depth: int) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py" and not depth:
            yield _line(depth, path.name, _first_line(path))
    for path in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield _line(depth, f"{path.name}/", _first_line(path / "__init__.py"))
        yield from _lines(path, depth + 1)


def _line(depth: int, name: str, text: str) -> str:
    return ("  " * (depth + 1) + name).ljust(WIDTH - 1) + " " + text


def _first_line(path: Path) -> str:
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    if not first:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring that names its job")
    return first[0].removesuffix(".")


if __name__ == "__main__":
    sys.exit(main())
