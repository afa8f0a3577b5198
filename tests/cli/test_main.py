"""Behaviour of all commands: help, errors and exit statuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast as package
from cli.conftest import Command, run_on_terminal, runs_without_torch
from holdfast.cli import main, make_parser
from holdfast.cli.commands import COMMANDS, load_command
from holdfast.errors import Corrupt, NotFound

PAGE = (Path(__file__).parent.parent.parent / "docs" / "cli.md").read_text()


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process."""
    given: dict[str, Any] = {"stdout": subprocess.PIPE, **options}
    command = [sys.executable, "-m", "holdfast.cli", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **given)


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    examples = re.findall(rf"^  (holdfast {command}\b.*)$", text.partition("\nexamples:\n")[2], re.M)
    assert examples
    for example in examples:
        words = [word.strip("'\"") for word in re.split(r" (?:\|\|?|&&|>) ", example)[0].split()[1:]]
        make_parser().parse_args(words)


def test_the_commands_in_the_documents_are_all_commands() -> None:
    assert set(re.findall(r"^## holdfast (\w+)$", PAGE, re.M)) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_in_the_documents_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.partition(f"\n## holdfast {command}\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", section))
    assert options <= set(re.findall(r"--[a-z][\w-]*", help_of(command, capsys)))


PRINTERS = ("print_table", "print_text", "print_fields", "print_csv", "print_output")
JSON_PRINTERS = ("print_json", "print_result", "print_output")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_prints_results_has_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json" in help_of(command, capsys)
    module = load_command(command)
    if any(hasattr(module, printer) for printer in PRINTERS):
        assert any(hasattr(module, printer) for printer in JSON_PRINTERS), "no JSON beside the text"


@pytest.mark.parametrize(
    "words",
    [
        "ls HOME",
        "ls HOME --all --local HOME",
        "show HOME",
        "verify HOME --all",
        "diff HOME HOME@100",
        "history HOME",
        "history HOME --checkpoints",
        "history HOME --metrics",
        "report HOME",
        "rm HOME --before 250 --dry-run",
        "export HOME OUT/model.safetensors",
        "trust --list",
        "queue",
        "forget --all-ended --dry-run",
    ],
)
def test_json_is_all_that_is_printed(
    words: str, home: Path, tmp_path: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    text = words.replace("HOME", str(home)).replace("OUT", str(tmp_path))
    result = holdfast(*text.split(), "--json")
    assert isinstance(result.json, (dict, list)), result.err


@pytest.mark.parametrize(
    ("words", "expected"), [("ls HOME", ["ls"]), ("--help", []), ("check --help", ["diff", "check"])]
)
def test_only_the_command_that_is_run_is_imported(words: str, expected: list[str], home: Path) -> None:
    """`check` compares checkpoints as `diff` does."""
    code = (
        "import sys; from holdfast.cli import main, COMMANDS\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "loaded = [name.rstrip('_') for name in sys.modules]\n"
        "print([name for name in COMMANDS if f'holdfast.cli.{name}' in loaded])"
    )
    command = [sys.executable, "-c", code, *words.replace("HOME", str(home)).split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(expected)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Checkpoints, as in `holdfast ls runs/gpt`:" in capsys.readouterr().err


def test_the_help_has_each_command_in_a_group_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    groups = re.findall(r"^(.+), as in `holdfast (.+)`:\n((?:  .+\n)+)", text, re.M)
    listed = [re.findall(r"^  (\w+) ", group[2], re.M) for group in groups]
    assert [name for names in listed for name in names] == list(COMMANDS)
    for (_, example, _), names in zip(groups, listed, strict=True):
        assert example.split()[0] in names
        make_parser().parse_args(example.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lss", "there is no command 'lss'. Did you mean ls?"),
        ("delete runs/gpt", "there is no command 'delete'. Did you mean rm?"),
        ("xyzzy", "there is no command 'xyzzy'."),
        ("queue --stauts failed", "queue: there is no option --stauts. Did you mean --status?"),
        ("--jsn", "there is no option --jsn."),
        ("report A B", "report: expected one HOME, found also B. A shell replaces runs/* by all that match:"),
        ("diff a b c", "diff: expected one A and one B, found also c."),
        ("queue 3", "queue: expected no argument, found also 3."),
        ("show", "show: the following arguments are required: HOME"),
    ],
)
def test_a_mistake_is_answered_in_two_lines_with_the_nearest_right_word(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert (ended.value.code, printed.out, len(lines)) == (2, "", 2)
    assert lines[0].startswith(f"holdfast: {expected}")
    assert re.fullmatch(r"`holdfast( \w+)? --help` lists all (commands|options)\.", lines[1])


def test_version_is_the_version_of_the_package() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"holdfast {package.__version__}")


@pytest.mark.parametrize(
    "words", [["nonsense"], ["show"], ["show", "x", "--step", "-1"], ["show", "x", "--step", "a"]]
)
def test_an_invalid_command_line_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (NotFound("nothing there"), 2, "nothing there"),
        (Corrupt("rotten"), 1, "rotten"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    error: BaseException, status: int, shown: str, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: str) -> None:
        raise error

    monkeypatch.setattr("holdfast.cli.homes.open_home", fail)
    result = holdfast("ls", "x")
    assert (result.status, result.err) == (status, f"holdfast: {shown}\n")


def test_an_unreachable_bucket_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is closed. With keys the client does not ask the machine for a role."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    assert main(["ls", "s3://bucket/run?endpoint_url=http://127.0.0.1:9&timeout=0.2s"]) != 0
    result = capsys.readouterr().err
    assert "Could not list s3://bucket/run" in result
    assert "Given up after" in result


def test_a_closed_pipe_ends_the_command_quietly(home: Path) -> None:
    """As in `holdfast show HOME | head -0`: there is no traceback, only a status."""
    reading, writing = os.pipe()
    os.close(reading)
    done = run("show", str(home), stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["ls", "show", "verify", "history", "rm"])
def test_commands_that_only_read_do_not_import_torch(command: str, home: Path) -> None:
    """All but `diff` are quick, and run where torch is not installed."""
    runs_without_torch(command, home, *(["--step", "100", "--dry-run"] if command == "rm" else []))


@pytest.mark.parametrize(
    ("words", "num_lines"),
    [("verify HOME --all", 6), ("diff HOME HOME", 3), ("rm HOME --superseded --yes", 3)],
)
def test_long_work_shows_a_progress_bar_on_a_terminal(words: str, num_lines: int, home: Path) -> None:
    """The bar is drawn on stderr. stdout has only the result."""
    out, drawn = run_on_terminal(*words.replace("HOME", str(home)).split())
    assert len(out.splitlines()) == num_lines, out
    assert b"\x1b[" in drawn


def test_output_that_cannot_be_written_is_an_error_of_one_line(home: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run("ls", str(home), stdout=full)
    message = "holdfast: the system refused a file operation: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_refusals_and_lists_come_before_the_import_of_torch(home: Path, tmp_path: Path) -> None:
    """Arguments are checked before the work: importing torch alone takes seconds."""
    missing = tmp_path / "nowhere"
    refused = (
        ["export", home, missing / "a.pt"],
        ["export", home, tmp_path / "a.weird"],
        ["export", home, tmp_path / "checkpoint-20", "--to", "trainer"],
        ["report", home, "-o", missing / "report.html"],
        ["metrics", home, "-o", missing / "run.prom"],
        ["tune", missing / "train.py"],
        ["check", missing / "train.py"],
        ["import", missing / "a.pt", tmp_path / "new"],
        ["trust", missing],
    )
    code = (
        "import sys\n"
        "from holdfast.cli import main\n"
        f"refused = {[[str(word) for word in words] for words in refused]!r}\n"
        "assert [main(words) for words in refused] == [2] * len(refused)\n"
        "assert main(['trust', '--list']) == 0\n"
        "print([name for name in ('torch', 'altair', 'vl_convert') if name in sys.modules])\n"
    )
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.endswith("\n[]\n"), done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_path_with_two_dots_is_shown_without_them(holdfast: Command, home: Path) -> None:
    assert holdfast("show", home / ".." / home.name).out.startswith(f"{home}: step 300")
