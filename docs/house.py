"""Trees of ARCHITECTURE.md and docs/files.md, generated from first lines: `python docs/house.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
DOCUMENTS = {"ARCHITECTURE.md": False, "docs/files.md": True}
"""Documents with a tree, and whether it lists the files of folders."""
BEGIN, END = "```\nsrc/holdfast/\n", "```\n"
WIDTH = 26
TOP = "The public names, imported when they are first used"
"""The package's own first line greets its users."""


def main() -> int:
    """Write the trees into the documents; with `--check` only compare them."""
    is_same = True
    for name, has_files in DOCUMENTS.items():
        path = ROOT / name
        text = path.read_text()
        generated = with_tree(text, has_files=has_files)
        if generated == text:
            continue
        is_same = False
        if sys.argv[1:] == ["--check"]:
            sys.stderr.write(f"The tree of {name} is not that of src/holdfast: run docs/house.py.\n")
        else:
            path.write_text(generated)
    return 0 if is_same or sys.argv[1:] != ["--check"] else 1


def with_tree(text: str, *, has_files: bool) -> str:
    """Return a document with the tree of today."""
    head, found, rest = text.partition(BEGIN)
    if not found:
        raise ValueError(f"a document has no block that begins with {BEGIN!r}")
    _, _, tail = rest.partition(f"\n{END}")
    lines = [_line(0, "__init__.py", TOP), *_lines(PACKAGE, 0, has_files=has_files)]
    return head + BEGIN + "\n".join(lines) + f"\n{END}" + tail


def _lines(folder: Path, depth: int, *, has_files: bool) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py" and (has_files or not depth):
            yield _line(depth, path.name, _first_line(path))
    for path in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield _line(depth, f"{path.name}/", _first_line(path / "__init__.py"))
        yield from _lines(path, depth + 1, has_files=has_files)


def _line(depth: int, name: str, text: str) -> str:
    return ("  " * (depth + 1) + name).ljust(WIDTH - 1) + " " + text


def _first_line(path: Path) -> str:
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    if not first:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring that names its job")
    return first[0].removesuffix(".")


if __name__ == "__main__":
    sys.exit(main())
