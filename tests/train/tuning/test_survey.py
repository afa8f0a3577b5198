"""Surveys of whole scripts: planted faults are found on their lines, a clean script is left in peace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.train.tuning.report import Report
from holdfast.train.tuning.survey import survey

SCRIPTS = Path(__file__).parent / "scripts"


def planted(script: Path) -> set[tuple[str, int]]:
    """Kind and line of each fault, as the script's own comments tell."""
    return {
        (kind, number)
        for number, line in enumerate(script.read_text().splitlines(), 1)
        for kind in re.findall(r"# fault: ([a-z ]*[a-z])", line)
    }


def found(report: Report) -> set[tuple[str, int]]:
    return {(one.kind, one.place.line if one.place else 0) for one in report.findings}


@pytest.mark.slow
def test_syncs_breaks_and_recompiles_are_found_on_their_lines() -> None:
    script = SCRIPTS / "planted.py"
    report = survey(str(script), questions={"syncs"}, num_steps=9)
    wanted = {one for one in planted(script) if one[0] in ("sync", "graph break", "recompile")}
    assert len(wanted) == 8
    assert {one for one in found(report) if one[0] != "input"} == wanted
    assert report.troubles == ()


@pytest.mark.slow
def test_every_planted_fault_is_found_and_none_is_invented() -> None:
    script = SCRIPTS / "planted.py"
    report = survey(str(script))
    assert found(report) == planted(script)
    assert len(planted(script)) == 11
    assert report.troubles == ()


@pytest.mark.slow
def test_the_advice_has_its_effect() -> None:
    """After every advice was followed none of it is given again, and samples go by several times as fast."""
    before = survey(str(SCRIPTS / "planted.py"), questions=())
    after = survey(str(SCRIPTS / "mended.py"), questions={"syncs", "shapes", "input"})
    assert (found(after), after.troubles) == (set(), ())
    assert after.pace.items_per_s > 3 * before.pace.items_per_s


@pytest.mark.slow
def test_nothing_is_reported_of_a_clean_script() -> None:
    report = survey(str(SCRIPTS / "clean.py"))
    kinds = {kind for kind, _ in found(report)}
    assert (kinds - {"compile"}, report.troubles) == (set(), ())
    assert ("compile" in kinds) == any(one.pays for one in report.verdicts)  # no fault, but what was measured
    assert report.verdicts


@pytest.mark.slow
def test_a_script_that_compiles_for_nothing_is_told_so() -> None:
    script = SCRIPTS / "compiled.py"
    report = survey(str(script), questions={"compile"})
    assert found(report) == planted(script)
    owns = [one for one in report.verdicts if one.variant == "own"]
    assert owns
    assert not any(one.pays for one in owns)


def test_a_rehearsal_leaves_the_run_alone(tmp_path: Path) -> None:
    """The home is neither read nor claimed, `torch.save` writes elsewhere, and `finally` still runs."""
    home, ended = tmp_path / "home", tmp_path / "ended"
    report = survey(str(SCRIPTS / "saving.py"), (str(home), str(ended)), questions=(), num_steps=3)
    assert len(report.steps.steps) == 3
    assert not home.exists()
    assert ended.read_text().startswith("restored")


def test_a_script_that_fails_is_shown_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemError('no such data')\n")
    with pytest.raises(InvalidInput, match="no such data"):
        survey(str(script))


@pytest.mark.slow
def test_a_script_that_trains_nothing_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('nothing to do')\n")
    with pytest.raises(InvalidInput, match="without one step"):
        survey(str(script))


def test_a_missing_script_is_told_at_once() -> None:
    with pytest.raises(InvalidInput, match="no script"):
        survey("nowhere.py")


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_are_surveyed_together() -> None:
    script = SCRIPTS / "ranks.py"
    report = survey(str(script), questions={"syncs", "compile"}, ranks=2, num_steps=6, timeout_s=200)
    assert planted(script) <= found(report)
    assert {kind for kind, _ in found(report)} <= {"sync", "compile"}
    assert report.troubles == ()
    assert report.verdicts
