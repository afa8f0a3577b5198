"""Texts and their summaries: what Python's library says of itself, or a table such as WikiHow's."""

from __future__ import annotations

import ast
import csv
import re
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

IGNORED = -100  # no loss where a label is this
MULTIPLE = 16  # widths are rounded up to it, so that there are few


@dataclass(frozen=True)
class Pair:
    """A text, and the line that sums it up."""

    text: str
    summary: str


def read_pairs(data: str, most: int) -> dict[str, list[Pair]]:
    """Pairs to train with, to choose the best checkpoint by, and to test.

    Args:
        data: "docstrings"; the path of a CSV file with columns `text` and `summary` or `headline`, such as
            the tutorial's wikihowAll.csv; or "hub:OWNER/NAME/FILE.csv", fetched from the hub.
        most: so many pairs at most.
    """
    pairs = docstrings() if data == "docstrings" else table(find_file(data))
    parts: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    seen: set[str] = set()
    for pair in pairs:
        if pair.text in seen:  # else what is tested could have been trained with
            continue
        seen.add(pair.text)
        lot = zlib.crc32(pair.text.encode()) % 10
        parts["validation" if lot == 0 else "test" if lot == 1 else "train"].append(pair)
        if len(seen) == most:
            break
    return parts


def docstrings() -> Iterable[Pair]:
    """From the docstrings of Python's library: all but the first line, and the first line."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & {*path.parts}:
            yield from docstrings_of(path.read_text(errors="ignore"))


def docstrings_of(source: str) -> Iterable[Pair]:
    """Those of one file whose first line is a sentence and whose rest is long enough to be summed up."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first, _, rest = (ast.get_docstring(node) or "").partition("\n")
            text = re.sub(r"\s+", " ", rest).strip()
            if len(text) > 80 and len(first.split()) > 2 and not first.startswith(node.name):
                yield Pair(text, first.strip())


def find_file(data: str) -> Path:
    """The file itself, or where one from the hub has been put."""
    if not data.startswith("hub:"):
        return Path(data)
    from huggingface_hub import hf_hub_download

    owner, name, file = data.removeprefix("hub:").split("/", 2)
    return Path(hf_hub_download(f"{owner}/{name}", file, repo_type="dataset"))


def table(path: Path) -> Iterable[Pair]:
    """From a CSV file."""
    csv.field_size_limit(1 << 24)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            text = " ".join((row.get("text") or "").split())
            summary = " ".join((row.get("summary") or row.get("headline") or "").split())
            if text and summary:
                yield Pair(text, summary)


class Tokens:
    """Pairs as tokens, and batches of them.

    Args:
        pairs: texts and summaries.
        tokenizer: of the model.
        longest: tokens of a text and of a summary, beyond which they are cut.
    """

    def __init__(self, pairs: Sequence[Pair], tokenizer: Any, longest: tuple[int, int]) -> None:
        self.pairs = list(pairs)
        self._pad = tokenizer.pad_token_id
        self._texts, self._summaries = (
            tokenizer([getattr(pair, part) for pair in pairs], truncation=True, max_length=most)["input_ids"]
            for part, most in zip(("text", "summary"), longest, strict=True)
        )
        self.lengths = [len(text) for text in self._texts]

    def batch(self, indices: Sequence[int | None], device: str) -> dict[str, torch.Tensor]:
        """Padded to the longest, rounded up; a None among the indices is a row that counts for nothing."""
        texts = [self._texts[index or 0] for index in indices]
        labels = [[] if index is None else self._summaries[index] for index in indices]
        input_ids = padded(texts, self._pad)
        batch = {
            "input_ids": input_ids,
            "attention_mask": (input_ids != self._pad).long(),
            "labels": padded(labels, IGNORED),
        }
        return {name: one.to(device) for name, one in batch.items()}


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Rows of one width, the longest rounded up."""
    width = -(-max(1, *map(len, rows)) // MULTIPLE) * MULTIPLE
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def share(num: int, rank: int, num_ranks: int, size: int) -> list[list[int | None]]:
    """Batches of a rank in which every sample comes on one rank once.

    Each rank gets equally many batches, since ranks of a sharded model wait for each other in every forward
    pass: where one has fewer samples, rows of None fill up, which count for nothing.
    """
    each = -(-num // num_ranks)
    mine: list[int | None] = list(range(rank, num, num_ranks))
    mine += [None] * (each - len(mine))
    return [mine[start : start + size] for start in range(0, each, size)]
