"""What all commands share: help, errors, exit statuses, how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as package
from holdfast.cli import COMMANDS, main, make_parser
from holdfast.errors import Corrupt, NotFound

PAGE = (Path(__file__).parent.parent.parent / "docs" / "cli.md").read_text()


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "holdfast.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_documents(command: str) -> None:
    assert f"\n## holdfast {command}\n" in PAGE


def test_documents_have_no_command_that_is_not_there() -> None:
    assert set(re.findall(r"^## holdfast (\w+)$", PAGE, re.M)) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_documents_have_no_option_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.partition(f"\n## holdfast {command}\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", section))
    assert options <= set(re.findall(r"--[a-z][\w-]*", help_of(command, capsys)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_speaks_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json" in help_of(command, capsys)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_version_is_the_package_s() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"holdfast {package.__version__}")


@pytest.mark.parametrize(
    "words", [["nonsense"], ["show"], ["show", "x", "--step", "-1"], ["show", "x", "--step", "a"]]
)
def test_a_wrong_command_line_is_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize(("error", "status"), [(NotFound("nothing there"), 2), (Corrupt("rotten"), 1)])
def test_errors_are_one_line_and_a_status(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(place: str) -> None:
        raise error

    monkeypatch.setattr("holdfast.cli.ls.open_home", fail)
    assert main(["ls", "x"]) == status
    assert capsys.readouterr().err == f"holdfast: {error}\n"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(place: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.ls.open_home", interrupt)
    assert main(["ls", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bucket_that_cannot_be_reached_is_told_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens on that port; the keys keep the client from asking the machine for a role."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    assert main(["ls", "s3://bucket/run?endpoint_url=http://127.0.0.1:9&timeout=0.2s"]) != 0
    said = capsys.readouterr().err
    assert "Could not list s3://bucket/run" in said
    assert "Given up after" in said


def test_a_reader_that_goes_away_ends_it_quietly(home: Path) -> None:
    """As in `holdfast show HOME | head -0`: no traceback, and the status says what happened."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "holdfast.cli", "show", str(home)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["ls", "show", "verify", "history", "rm"])
def test_looking_needs_no_torch(command: str, home: Path) -> None:
    """Everything but `diff` works without importing torch: it is quick, and runs where torch is not."""
    words = [command, str(home), *(["--step", "100", "--dry-run"] if command == "rm" else [])]
    code = f"import sys; from holdfast.cli import main; s = main({words}); print('torch' in sys.modules, s)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["False 0"], done.stderr


def test_verify_shows_its_progress_to_a_person(home: Path) -> None:
    """On a terminal a bar is drawn on stderr; stdout holds the result alone."""
    pty = pytest.importorskip("pty")
    person, terminal = pty.openpty()
    command = [sys.executable, "-m", "holdfast.cli", "verify", str(home), "--all"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, text=True, check=False)
    os.close(terminal)
    drawn = os.read(person, 1 << 16)
    os.close(person)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 6
    assert b"\x1b[" in drawn
