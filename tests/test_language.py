"""The language of docstrings and documents: imperatives for functions, noun phrases, everyday words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "holdfast"
FILES = sorted(PACKAGE.rglob("*.py"))
IN_FOLDERS = [path for folder in ("docs", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.md")]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *IN_FOLDERS})

RULES = {
    "opens with a clause instead of a verb or a noun": re.compile(
        r"^(`[^`]+`: )?(What|Who|Whoever|Whose|Where|How|Which|Whether)\b"
    ),
    "lets code speak: it returns, logs, sends, receives, raises or records": re.compile(
        r"\b(told|tells?|telling|says?|said|hears?|heard|knows?|known|speaks? of|word of)\b", re.IGNORECASE
    ),
    "names nobody instead of a subject": re.compile(
        r"\b(nobody|somebody|whoever|whatever becomes|anybody)\b", re.IGNORECASE
    ),
    "says that something is there: name the verb": re.compile(
        r"\b(is|are|was|were) (already |not |still )?there\b(?!fore)", re.IGNORECASE
    ),
    "chains clauses by a preposition and a pronoun": re.compile(
        r"\b(of|in|by|from|to|for|with|at) (which|whom|whose)\b", re.IGNORECASE
    ),
    "negates the noun: negate the verb": re.compile(
        r"\b(is|are|be) no\b|\bhas none\b|\bthere is none\b", re.IGNORECASE
    ),
}


CLAUSE = next(iter(RULES))


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield where each docstring of a file begins, and its first paragraph on one line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node)
            if text:
                yield f"{path}:{getattr(node, 'lineno', 1)}", re.sub(r"\s+", " ", text.split("\n\n")[0])


def faults(text: str) -> list[str]:
    """Return the rules that a docstring's first paragraph breaks."""
    return [rule for rule, pattern in RULES.items() if pattern.search(text)]


def openings(text: str) -> Iterator[str]:
    """Yield the headings of a document, and the first sentence after each."""
    text = re.sub(r"<!-- api.*?<!-- /api -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for found in re.finditer(r"^#+ +(.+?) *\n+(?:(?![#|<>])(.+?(?:[.:?!](?=\s)|\n\n)))?", text, re.M | re.S):
        yield from (re.sub(r"\s+", " ", one).strip() for one in found.groups() if one)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_headings_and_first_sentences_do_not_open_with_a_clause(path: Path) -> None:
    found = openings(path.read_text())
    if path.name == "questions.md":  # its headings are what readers ask
        found = (text for text in found if not text.endswith("?"))
    broken = [text for text in found if RULES[CLAUSE].search(text)]
    assert not broken, "\n".join(broken)


def test_a_heading_and_a_sentence_that_open_with_a_clause_are_found() -> None:
    text = (
        "# What it is\n\nA store\nfor files. More.\n\n# Use\n\n```sh\n# a\n```\n\nHow to use it:\n\n# End\n"
    )
    found = list(openings(text))
    assert found == ["What it is", "A store for files.", "Use", "How to use it:", "End"]
    assert [one for one in found if RULES[CLAUSE].search(one)] == ["What it is", "How to use it:"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_are_plain(path: Path) -> None:
    broken = [f"{where}: {text} [{fault}]" for where, text in docstrings(path) for fault in faults(text)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "text",
    [
        "What the keeper has written.",
        "`path`: Where the file is.",
        "Return what rank 0 told the others.",
        "The lock that tells that an uploader is alive.",
        "Return True if nobody holds the lock.",
        "Return True if the file is not there.",
        "Return the tensors of which a rank holds a part.",
        "Return None if it is no tensor.",
    ],
)
def test_a_sentence_that_breaks_a_rule_is_found(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "Return the hash of each chunk.",
        "Write an object, replacing any existing one.",
        "Upload queue of one directory.",
        "Return True if each rank has its own tensor under `name`. Frozen tensors are shared.",
    ],
)
def test_plain_sentences_are_accepted(text: str) -> None:
    assert not faults(text)
