"""The command of a service: its line for cron, quoted for cron and the shell, and its name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.jobs.service import BootCommand, make_boot_command

NAMES = [
    *("plain", "with spaces", "50% of %", 'it\'s "quoted" $HOME `id` ;&|<>'),
    *("back\\slash \\\\ two \\% and \\' end\\", "# a comment, ümläut"),
]


def as_cron_runs(line: bytes, *, keeps_backslash: bool) -> bytes:
    """Return the command that a version of cron passes to the shell."""
    command = line.removeprefix(b"@reboot ")
    out, place = bytearray(), 0
    while place < len(command):
        pair = command[place : place + 2]
        if pair[:1] == b"%":
            break  # the rest is standard input
        if pair[:1] == b"\\":
            out += pair[1:] if pair == b"\\%" and not keeps_backslash else pair
            place += 2
        else:
            out += pair[:1]
            place += 1
    return bytes(out)


@pytest.mark.parametrize("keeps_backslash", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_any_path_arrives_whole(tmp_path: Path, name: str, keeps_backslash: bool) -> None:
    state = tmp_path / name
    state.mkdir()
    words = ("/bin/sh", "-c", 'printf "%s\\n" "$STATE" "$1" "$PWD"', "sh", name)
    line = BootCommand("s", state, {"STATE": str(state)}, words).cron_line()
    assert line is not None
    text = as_cron_runs(line.encode(), keeps_backslash=keeps_backslash)
    subprocess.run(["/bin/sh", "-c", text], env={}, cwd="/", check=True)
    assert (state / "service.log").read_text() == f"{state}\n{name}\n/\n"


def test_a_command_that_cron_would_cut_off_has_no_line(tmp_path: Path) -> None:
    command = BootCommand("s", tmp_path, {"STATE": "x" * 990}, ("true",))
    assert command.cron_line() is None


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1bb", "a\udcffb"])
def test_a_line_break_in_a_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="Nothing was changed"):
        make_boot_command(Path("/tmp") / name)


def test_folders_of_one_name_have_services_of_their_own(tmp_path: Path) -> None:
    names = {make_boot_command(tmp_path / parent / "jobs").name for parent in ("a", "b")}
    assert len(names) == 2
    assert all(name.startswith("holdfast-jobs-") for name in names)
