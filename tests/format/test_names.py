"""Names of objects are formatted and parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.limits import MAX_ATTEMPT, MAX_RANKS, MAX_STEP
from holdfast.checkpoint.format.names import Parsed
from holdfast.checkpoint.store.contract import check_name

steps, attempts, ranks = (st.integers(0, most) for most in (MAX_STEP, MAX_ATTEMPT, MAX_RANKS - 1))


@given(steps, attempts, ranks)
def test_object_names_round_trip(step: int, attempt: int, rank: int) -> None:
    facts = {
        names.manifest(step, attempt): Parsed("manifest", step, attempt),
        names.data(step, attempt, rank): Parsed("data", step, attempt, rank),
        names.frozen(step, attempt, rank): Parsed("frozen", step, attempt, rank),
        names.part(step, attempt, rank): Parsed("part", step, attempt, rank),
        names.metrics(step, attempt): Parsed("metrics", step, attempt),
        names.attempt(attempt): Parsed("attempt", attempt=attempt),
        f"{names.step_dir(step)}/stray.txt": Parsed("step-other", step),
        names.step_dir(step): Parsed("step-other", step),
    }
    assert {name: names.parse(name) for name in facts} == facts
    assert all(check_name(name) for name in [*facts, names.RUN, names.DONE, names.history(attempt, rank)])
    assert names.parse_record("history", names.history(attempt, rank)) == Parsed(
        "history", attempt=attempt, rank=rank
    )


@given(st.lists(st.integers(0, 10**8 - 1)))
def test_names_sort_by_step(steps: list[int]) -> None:
    """In a plain listing too, as long as steps have at most eight digits."""
    assert sorted(map(names.step_dir, steps)) == [names.step_dir(step) for step in sorted(steps)]


@pytest.mark.parametrize(
    "name",
    [
        *("holdfast.json", "done.json", "history/a0001-rank-00000.jsonl", "", "step-"),
        *("step-500/manifest-a0001.json", f"step-{MAX_STEP + 1}/manifest-a0001.json", "attempts/a1.json"),
        *("attempts/a0001.json\n", f"attempts/a{MAX_ATTEMPT + 1}.json", f"attempts/a{'9' * 240}.json"),
        *("attempts/a00001.json", "attempts/a0001.json.tmp", "x/attempts"),
        *("step-0000000500", "step-00000500\n/a", "xstep-00000500/manifest-a0001.json"),
        "step-\u0660\u0660\u0660\u0660\u0660\u0665\u0660\u0660/manifest-a0001.json",  # digits, but not ours
    ],
)
def test_invalid_names_are_not_parsed(name: str) -> None:
    """Wrong widths, other digits, something before or behind."""
    assert names.parse(name) is None


FOREIGN = ("manifest-a001.json", "manifest-a0001.json\n", "manifest-a00001.json", "rank-0-a0001.json")


@pytest.mark.parametrize("name", [*FOREIGN, "rank-00000-a0001.pt"])
def test_foreign_files_in_a_step_folder_are_recognized(name: str) -> None:
    assert names.parse(f"step-00000500/{name}") == Parsed("step-other", 500)


@given(st.from_regex(r"\A(attempts/a|step-00000005/manifest-a)\d{1,7}\.json\n?\Z"))
def test_a_name_has_one_spelling(name: str) -> None:
    """A name that is parsed is the one that its facts are written as; Unicode digits, widths, line ends."""
    facts = names.parse(name)
    if facts is not None and facts.kind == "attempt":
        assert names.attempt(facts.attempt) == name
    elif facts is not None and facts.kind == "manifest":
        assert names.manifest(facts.step, facts.attempt) == name
    else:
        digits = name.rpartition("a")[2].partition(".")[0]
        is_ours = digits.isascii() and len(digits) >= 4 and digits == f"{int(digits):04d}"
        assert not is_ours or name.endswith("\n")
