"""The T5 example: its data by itself; and the whole, killed and resumed on other numbers of ranks."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.running import EXAMPLES, run_on

EXAMPLE = EXAMPLES / "t5_summarize"
SMALL = ("--most", "160", "--epochs", "3", "--batch", "8", "--dropout", "0", "--every", "10", "--test", "6")

pytest.importorskip("transformers", reason="needs the extra `examples`")


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module of that name."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "pairs", raising=False)
    return importlib.import_module("pairs")


class Words:
    """A tokenizer whose tokens are the lengths of words."""

    pad_token_id = 0

    def __call__(self, texts: list[str], *, truncation: bool, max_length: int) -> dict[str, list[list[int]]]:
        assert truncation
        return {"input_ids": [[len(word) for word in text.split()][:max_length] for text in texts]}


def test_docstrings_are_split_into_texts_and_summaries(pairs: Any) -> None:
    body = "This tells at length what the function does, in more words than anybody wants to read at once."
    source = f'def f():\n    """Do what is wanted.\n\n    {body}\n    """\n\ndef g():\n    """Short."""\n'
    assert list(pairs.docstrings_of(source)) == [pairs.Pair(body, "Do what is wanted.")]
    assert list(pairs.docstrings_of("def broken(:")) == []


def test_a_table_is_split_so_that_each_text_is_in_one_part(pairs: Any, tmp_path: Path) -> None:
    rows = [f'"Do {number}","title","Text\nof {number % 90}"' for number in range(100)]
    (tmp_path / "wikihowAll.csv").write_text("headline,title,text\n" + "\n".join(rows) + '\n"","t","x"\n')
    parts = pairs.read_pairs(str(tmp_path / "wikihowAll.csv"), 1000)
    texts = [pair.text for part in parts.values() for pair in part]
    assert sorted(texts) == sorted(f"Text of {number}" for number in range(90))
    assert all(parts.values())
    assert len(parts["train"]) > 50
    assert sum(map(len, pairs.read_pairs(str(tmp_path / "wikihowAll.csv"), 7).values())) == 7


def test_batches_are_padded_to_few_widths_and_fillers_have_no_labels(pairs: Any) -> None:
    tokens = pairs.Tokens([pairs.Pair("a bb ccc", "a"), pairs.Pair("word " * 40, "bb a")], Words(), (20, 8))
    assert tokens.lengths == [3, 20]
    batch = tokens.batch([0, 1, None], "cpu")
    assert batch["input_ids"].shape == (3, 32)
    assert batch["input_ids"][0, :4].tolist() == [1, 2, 3, 0]
    assert batch["attention_mask"].sum(1).tolist() == [3, 20, 3]
    assert (batch["labels"] >= 0).sum(1).tolist() == [1, 2, 0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_sample_is_validated_once_in_equally_many_batches(pairs: Any, num_ranks: int) -> None:
    shares = [pairs.share(13, rank, num_ranks, 2) for rank in range(num_ranks)]
    found = Counter(index for batches in shares for batch in batches for index in batch)
    fillers = found.pop(None, 0)
    assert found == Counter(range(13))
    assert fillers < num_ranks
    assert len({len(batches) for batches in shares}) == 1


def run(num_ranks: int, home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The example to its end, whatever that is."""
    words = ("--home", home, *SMALL, *arguments)
    return run_on(num_ranks, EXAMPLE / "train.py", *words, **{"HF_HUB_OFFLINE": "1", **env})


def curve_of(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.ranks
def test_killed_on_two_ranks_and_resumed_on_one_and_four_the_loss_continues(
    tmp_path: Path,
) -> None:
    """Without dropout the curve of any number of ranks is that of one, but for rounding."""
    straight = run(1, tmp_path / "straight", "--curve", str(tmp_path / "straight.txt"))
    assert straight.returncode == 0, straight.stderr
    expected = curve_of(tmp_path / "straight.txt")
    assert sum(expected[-5:]) < 0.95 * sum(expected[:5])

    home = tmp_path / "home"
    kills = {"HOLDFAST_KILL_AT": "trainer.handed:3", "HOLDFAST_KILL_MARK": str(tmp_path / "mark")}
    killed = run(2, home, **kills)
    assert killed.returncode != 0
    assert (tmp_path / "mark").exists()
    kills["HOLDFAST_KILL_MARK"] = str(tmp_path / "mark2")
    again = run(1, home, **kills)
    assert again.returncode != 0
    assert re.search(r"restored step (10|15|20) from", again.stderr), again.stderr
    done = run(4, home, "--curve", str(tmp_path / "curve.txt"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"restored step \d+ from", done.stderr)
    assert curve_of(tmp_path / "curve.txt") == pytest.approx(expected, rel=5e-3)
    assert re.search(r"6 texts: rouge1 [\d.]+, rouge2 [\d.]+, rougeL [\d.]+", done.stdout)
    assert "it sums up texts that it has not seen" in done.stdout
