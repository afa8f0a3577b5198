"""The line of a service in a crontab: quoted for cron and the shell, and the only line that changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.jobs.service.boot_command import BootCommand, make_boot_command
from holdfast.jobs.service.crontab import cron_line, find_line, with_line, without_line

NAMES = [
    "plain",
    "with spaces",
    "50% of %",
    'it\'s "quoted" $HOME `id` ;&|<>',
    "back\\slash \\\\ two \\% and \\' end\\",
    "# a comment, ümläut",
]
OTHERS = [
    b"",
    b"# mine\n5 4 * * * echo 'a%b'\n",
    b"MAILTO=me\n@reboot /home/me/start\n\n",
    b"\xff\xfe bytes\n  * * * * * x\t\n#@reboot old # holdfast service s\n",
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
    line = cron_line(BootCommand("s", state, {"STATE": str(state)}, words))
    text = as_cron_runs(line, keeps_backslash=keeps_backslash)
    subprocess.run(["/bin/sh", "-c", text], env={}, cwd="/", check=True)
    assert (state / "service.log").read_text() == f"{state}\n{name}\n/\n"


@pytest.mark.parametrize("table", OTHERS)
def test_other_lines_stay_byte_by_byte(table: bytes) -> None:
    first = with_line(table, b"@reboot one # holdfast service s", "s")
    assert first == table + b"@reboot one # holdfast service s\n"
    assert with_line(first, b"@reboot one # holdfast service s", "s") == first
    second = with_line(first, b"@reboot two # holdfast service t", "t")
    changed = with_line(second, b"@reboot new # holdfast service s", "s")
    assert changed == second.replace(b"@reboot one", b"@reboot new")
    assert find_line(changed, "s") == b"@reboot new # holdfast service s"
    assert without_line(without_line(changed, "s"), "t") == table


def test_a_table_without_a_final_line_break_and_with_copies_of_the_line() -> None:
    own = b"@reboot x # holdfast service s"
    assert with_line(b"a", own, "s") == b"a\n" + own + b"\n"
    assert with_line(own + b"\na\n" + own + b"\n", own, "s") == own + b"\na\n"


def test_a_command_that_cron_would_cut_off_is_refused(tmp_path: Path) -> None:
    command = BootCommand("s", tmp_path, {"STATE": "x" * 990}, ("true",))
    with pytest.raises(InvalidInput, match="999"):
        cron_line(command)


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1bb", "a\udcffb"])
def test_a_line_break_in_a_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="Nothing was changed"):
        make_boot_command(Path("/tmp") / name)


def test_folders_of_one_name_have_services_of_their_own(tmp_path: Path) -> None:
    names = {make_boot_command(tmp_path / parent / "jobs").name for parent in ("a", "b")}
    assert len(names) == 2
    assert all(name.startswith("holdfast-jobs-") for name in names)
