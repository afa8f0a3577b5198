"""`holdfast ls` lists every checkpoint with its state."""

from __future__ import annotations

import shutil
from pathlib import Path

from cli.conftest import Command, flip, save
from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.listing import WriterId
from holdfast.checkpoint.home.metrics import SaveValues, write_metrics
from holdfast.checkpoint.store import open_store
from making import make_home


def states(document: dict) -> dict[tuple[int, int], str]:
    return {(row["step"], row["attempt"]): row["state"] for row in document["checkpoints"]}


def test_lists_complete_checkpoints_newest_first(holdfast: Command, home: Path) -> None:
    result = holdfast("ls", home, "--json")
    assert result.status == 0
    rows = result.json["checkpoints"]
    assert [(row["step"], row["attempt"]) for row in rows] == [(300, 2), (250, 2), (200, 1), (100, 1)]
    assert [row["is_newest"] for row in rows] == [True, False, False, False]
    assert {row["ranks"] for row in rows} == {2}
    assert result.json["run"] == "run-one"


def test_all_shows_superseded_and_incomplete(holdfast: Command, home: Path) -> None:
    assert states(holdfast("ls", home, "--all", "--json").json) == {
        (400, 2): "incomplete",
        (300, 2): "complete",
        (250, 2): "complete",
        (300, 1): "superseded",
        (200, 1): "complete",
        (100, 1): "complete",
    }


def test_size_is_that_of_all_files(holdfast: Command, home: Path) -> None:
    row = holdfast("ls", home, "--json").json["checkpoints"][-1]
    files = list((home / "step-00000100").iterdir())
    assert row["num_bytes"] == sum(file.stat().st_size for file in files)
    assert row["created_unix_s"] == 1_700_000_100.0


def test_table_has_a_line_for_each_and_counts_the_rest(holdfast: Command, home: Path) -> None:
    lines = holdfast("ls", home).out.splitlines()
    rows = [" ".join(line.split()[:3]) for line in lines[:5]]
    assert rows == ["STEP ATTEMPT RANKS", "300 2 2", "250 2 2", "200 1 2", "100 1 2"]
    assert lines[1].endswith("complete, newest")
    assert "1 incomplete and 1 superseded not shown" in lines[5]


def test_a_manifest_that_cannot_be_read_is_damage_and_not_the_newest(holdfast: Command, home: Path) -> None:
    flip(home / names.manifest(300, 2))
    result = holdfast("ls", home, "--json")
    rows = {(row["step"], row["attempt"]): row for row in result.json["checkpoints"]}
    assert rows[300, 2]["state"] == "damaged"
    assert "seal" in rows[300, 2]["reason"]
    assert [key for key, row in rows.items() if row["is_newest"]] == [(250, 2)]
    assert "does not match its own seal" in holdfast("ls", home).out


def test_a_truncated_or_missing_file_is_damage(holdfast: Command, home: Path) -> None:
    data = home / names.data(300, 2, 1)
    data.write_bytes(data.read_bytes()[:-1])
    (home / names.part(250, 2, 0)).unlink()
    found = states(holdfast("ls", home, "--json").json)
    assert (found[300, 2], found[250, 2]) == ("damaged", "damaged")


def test_a_checkpoint_of_another_run_is_damage(holdfast: Command, home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_home(open_store(other), run_id="run-two")
    (home / "step-00000100").rename(other / "step-00000100")
    row = holdfast("ls", other, "--json").json["checkpoints"][0]
    assert row["state"] == "damaged"
    assert "another run" in row["reason"]


def test_foreign_files_are_reported(holdfast: Command, home: Path) -> None:
    (home / "step-00000100" / "notes.txt").write_text("mine")
    assert "1 foreign file, such as step-00000100/notes.txt" in holdfast("ls", home).out


def test_a_home_without_checkpoints_is_not_an_error_and_a_missing_one_is(
    holdfast: Command, home: Path, tmp_path: Path
) -> None:
    make_home(open_store(tmp_path / "new"))
    result = holdfast("ls", tmp_path / "new")
    assert (result.status, result.out) == (0, "no checkpoints\n")
    result = holdfast("ls", tmp_path / "none").refused("does not contain a run")
    assert result.out == ""
    assert result.err.startswith("holdfast: ")
    assert not (tmp_path / "none").exists(), "looking must not make a home"
    holdfast("ls", home / "step-00000100").refused(f"HOME is the folder above it: {home}.")


def test_a_damaged_run_document_is_reported_and_ignored(holdfast: Command, home: Path) -> None:
    flip(home / names.RUN)
    result = holdfast("ls", home, "--json")
    assert result.status == 0
    assert len(result.json["checkpoints"]) == 4
    assert "holdfast.json" in result.err


def test_an_attempt_from_scratch_supersedes_everything(holdfast: Command, home: Path) -> None:
    save(home, 50, 3)
    found = states(holdfast("ls", home, "--all", "--json").json)
    assert found.pop((50, 3)) == "complete"
    assert set(found.values()) == {"superseded", "incomplete"}


def test_with_a_local_folder_the_tiers_of_each_checkpoint_are_listed(
    holdfast: Command, home: Path, tmp_path: Path
) -> None:
    """Checkpoints in both places, in the local folder only, and with the files of one rank."""
    local = shutil.copytree(home, tmp_path / "local")
    for step in (100, 250):
        shutil.rmtree(local / f"step-{step:08d}")
    shutil.rmtree(home / "step-00000300")
    (local / names.manifest(200, 1)).unlink()
    (local / names.part(200, 1, 0)).unlink()
    rows = holdfast("ls", home, "--local", local, "--json").json["checkpoints"]
    assert {(row["step"], row["attempt"]): row["tiers"] for row in rows} == {
        (300, 2): ["local"],
        (250, 2): ["home"],
        (200, 1): ["local (ranks 1)", "home"],
        (100, 1): ["home"],
    }
    assert {row["state"] for row in rows} == {"complete"}
    lines = holdfast("ls", home, "--local", local).out.splitlines()
    assert lines[0].split()[-1] == "TIERS"
    assert lines[3].endswith("local (ranks 1), home")


def test_a_local_folder_of_another_run_is_rejected(holdfast: Command, home: Path, tmp_path: Path) -> None:
    make_home(open_store(tmp_path / "other"), run_id="run-two")
    holdfast("ls", home, "--local", tmp_path / "other").refused("another run")


def write_losses(home: Path, losses: dict[tuple[int, int], float]) -> None:
    for (step, attempt), loss in losses.items():
        writer = WriterId("run-one", attempt, 0, 2)
        write_metrics(open_store(home), writer, step, SaveValues({"loss": loss, "lr": 0.1}), {})


def test_sorts_by_a_metric_and_shows_its_values(holdfast: Command, home: Path) -> None:
    write_losses(home, {(100, 1): 2.5, (200, 1): 0.125, (250, 2): float("nan")})
    lines = holdfast("ls", home, "--sort", "loss").out.splitlines()
    assert lines[0].split()[:5] == ["STEP", "ATTEMPT", "RANKS", "LOSS", "SIZE"]
    rows = [" ".join(line.split()[:4]) for line in lines[1:5]]
    assert rows == ["200 1 2 0.125", "100 1 2 2.5", "300 2 2 -", "250 2 2 nan"]
    for words, steps in ((["--sort", "loss"], "100 200 300 250"), ([], "100 200 250 300")):
        reverse = holdfast("ls", home, "--reverse", *words).out.splitlines()
        assert [line.split()[0] for line in reverse[1:5]] == steps.split()


def test_the_best_is_shown_and_exported_by_its_metric(holdfast: Command, home: Path, tmp_path: Path) -> None:
    write_losses(home, {(200, 1): 0.125, (300, 2): 0.5})
    assert holdfast("show", home, "--best", "loss", "--json").json["step"] == 200
    done = holdfast("export", home, tmp_path / "best.pt", "--best", "loss", "--json")
    assert done.json["step"] == 200
    assert "exporting step 200, the best by loss" in done.err
    holdfast("show", home, "--best", "loss", "--step", 200).refused("not both")
    holdfast("show", home, "--best", "accuracy").refused("accuracy")


def test_sorts_best_first_by_the_mode_that_the_run_recorded(holdfast: Command, home: Path) -> None:
    store = open_store(home)
    for step, attempt, loss in ((200, 1, 0.5), (300, 2, 0.9)):
        writer = WriterId("run-one", attempt, 0, 2)
        of_steps = {"loss": 196} if step == 200 else {}
        write_metrics(store, writer, step, SaveValues({"loss": loss}, of_steps), {"loss": "max"})
    rows = holdfast("ls", home, "--sort", "loss").out.splitlines()
    assert "0.9" in rows[1]
    assert "0.5 (step 196)" in rows[2]
    assert "0.5" in holdfast("ls", home, "--sort", "loss", "--reverse").out.splitlines()[1]


def test_json_has_the_metrics_of_each_checkpoint(holdfast: Command, home: Path) -> None:
    write_losses(home, {(200, 1): 0.125, (250, 2): float("nan")})
    rows = holdfast("ls", home, "--json", "--sort", "loss").json["checkpoints"]
    assert [(row["step"], row["metrics"]) for row in rows] == [
        (200, {"loss": 0.125, "lr": 0.1}),
        (300, {}),
        (250, {"loss": "nan", "lr": 0.1}),
        (100, {}),
    ]


def test_a_metric_that_was_never_recorded_is_refused_with_those_that_were(
    holdfast: Command, home: Path
) -> None:
    write_losses(home, {(200, 1): 0.125})
    holdfast("ls", home, "--sort", "los").refused("No checkpoint", "loss, lr")


def test_damaged_metrics_are_shown_as_missing(holdfast: Command, home: Path) -> None:
    write_losses(home, {(100, 1): 2.5, (200, 1): 0.125})
    flip(home / names.metrics(200, 1))
    lines = holdfast("ls", home, "--sort", "loss").out.splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [["100", "1", "2", "2.5"], ["300", "2", "2", "-"]]


def test_rm_deletes_metrics_with_their_checkpoint(holdfast: Command, home: Path) -> None:
    write_losses(home, {(200, 1): 0.125})
    assert holdfast("rm", home, "--step", "200", "--yes").status == 0
    assert not (home / names.step_dir(200)).exists()
