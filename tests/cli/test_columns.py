"""Tables fit the terminal: names are shortened and sentences wrapped."""

from __future__ import annotations

import os
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cli.conftest import Command, append_event
from holdfast.checkpoint.store import open_store
from holdfast.cli.demo.claims import Recovery
from holdfast.cli.demo.screen import RECOVERY_COLUMNS
from holdfast.cli.layout import cut, lay_out
from holdfast.cli.tables import Column, print_table, printable
from making import make_checkpoint

LONG = "model.transformer.layers.{}.self_attention.query_key_value.lora_adapters" + ".default" * 50
WHY = "The write failed: No space left on device. Earlier checkpoints are whole, and training continues."


@pytest.fixture
def wide(home: Path) -> Path:
    """Make a home with names and details that are longer than a line."""
    store = open_store(str(home))
    for step in (1_234_567, 2_345_678):
        tensors = {LONG.format(i): torch.full((1024, 3), float(i * step)) for i in range(3)}
        make_checkpoint(store, step, 12, [tensors], values=[{"note": WHY}])
    for number, event in enumerate(("saved", "persisted", "committed", "drain-failed")):
        more = {"bytes": 123_456_789_012, "seconds": 754.2, "detail": WHY, "tier": "home"}
        append_event(home, 12, 1.7e9 + number, event, 2_345_678, rank=1023, **more)
    return home


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["ls", "--all"],
        ["show"],
        ["verify", "--all"],
        ["history"],
        ["history", "--checkpoints"],
        ["rm", "--before", "2000000", "--dry-run"],
        ["diff"],
        ["report"],
    ],
    ids=" ".join,
)
def test_nothing_is_wider_than_the_terminal(
    holdfast: Command, wide: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command, *options = words
    monkeypatch.chdir(wide.parent)
    places = [f"{wide.name}@{step}" for step in (1_234_567, 2_345_678)] if command == "diff" else [wide.name]
    result = holdfast(command, *places, *options)
    assert result.out
    lines = [line for line in result.out.splitlines() if str(wide) not in line]  # a path is whole
    assert [line for line in lines if len(line) > 80] == []


def test_a_long_name_is_shortened_in_the_table_but_not_in_json(
    holdfast: Command, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LONG.format(0) in holdfast("show", wide).out  # a pipe gets all
    monkeypatch.setenv("COLUMNS", "80")
    out = holdfast("show", wide).out
    assert LONG.format(0) not in out
    assert any("model.transf" in line and "…" in line for line in out.splitlines())
    assert LONG.format(0) in [one["name"] for one in holdfast("show", wide, "--json").json["tensors"]]


def test_a_detail_is_wrapped_but_not_shortened(
    holdfast: Command, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = holdfast("history", wide, "--event", "drain-failed").out
    assert " ".join(out.split()).endswith(WHY)


def table(*rows: tuple[str, ...], kinds: tuple[str, ...] = ("name", "text")) -> list[str]:
    columns = [Column(f"C{i}", itemgetter(i), kind) for i, kind in enumerate(kinds)]  # pyright: ignore[reportArgumentType] they are kinds
    return lay_out(columns, rows, 40)


def test_a_sentence_is_below_its_row_only_if_it_is_long_and_does_not_fit() -> None:
    name = "a" * 30
    assert table((name, "finished"))[1].endswith("  finished")
    assert table((name, "-"), (name, " ".join(["word"] * 9)))[1:] == [
        name,
        name,
        "    word word word word word word word",
        "    word word",
    ]
    first = table((" ".join(["word"] * 9), name), kinds=("text", "name"))  # it names the row
    assert len(first) == 4
    assert all(line.startswith("word word word") for line in first[1:])


def test_a_table_of_many_rows_has_headings_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first rows are printed before the last are laid out. In a pipe there is one heading."""
    columns = [Column("NUMBER", str, "right"), Column("NAME", lambda _: "n" * 100, "name")]
    print_table(columns, range(2500))
    assert capsys.readouterr().out.count("NUMBER") == 1
    monkeypatch.setenv("COLUMNS", "80")
    print_table(columns, range(2500))
    lines = capsys.readouterr().out.splitlines()
    assert [i for i, line in enumerate(lines) if line.startswith("NUMBER")] == [0, 1001, 2002]
    assert len(lines) == 2503


@pytest.mark.parametrize(("width", "is_imported"), [("80", False), ("30", True)])
def test_rich_is_imported_only_for_a_table_that_does_not_fit(
    home: Path, width: str, is_imported: bool
) -> None:
    code = "import sys; from holdfast.cli import main; main(sys.argv[1:]); print('rich' in sys.modules)"
    command = [sys.executable, "-c", code, "ls", str(home)]
    done = subprocess.run(
        command, env={**os.environ, "COLUMNS": width}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(is_imported)


def test_the_recoveries_of_the_demo_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    recovery = Recovery("kill -9 between saves", 188, -9, 180, 8, True, 0.2036, 10.6)
    print_table(RECOVERY_COLUMNS, [recovery])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("kill -9 between saves,")
    assert lines[2] == "newest damaged"


cells = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=60)


@given(st.lists(st.tuples(cells, cells, cells), max_size=5), st.integers(60, 200))
@example(rows=[("0" * 16, "", "0" * 23 + "\u2e80"), ("", "0" * 16, "")], width=60)
def test_any_texts_fit(rows: list[tuple[str, str, str]], width: int) -> None:
    from rich.cells import cell_len

    columns = [Column("NAME", str, "name"), Column("KIND", str, "name"), Column("WHY", str, "text")]
    lines = lay_out(columns, rows, width)
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) >= 1 + len(rows)


@given(cells, st.integers(4, 40))
def test_a_shortened_text_keeps_its_ends(text: str, width: int) -> None:
    from rich.cells import cell_len

    found = cut(text, width)
    assert cell_len(found) <= width
    if found != text:
        assert found[:1] in (text[:1], "…")
        assert "…" in found


def test_control_characters_cannot_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\n\x9bc\u202e") == r"a\x1b[2Jb\n\x9bc\u202e"
