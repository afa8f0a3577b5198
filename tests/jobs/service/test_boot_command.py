"""The command of a service, quoted for the shell, and its name."""

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


@pytest.mark.parametrize("name", NAMES)
def test_any_path_arrives_whole(tmp_path: Path, name: str) -> None:
    state = tmp_path / name
    words = ("/bin/sh", "-c", 'printf "%s\\n" "$STATE" "$1" "$PWD"', "sh", name)
    text = BootCommand("s", state, {"STATE": str(state)}, words).shell_text()
    found = subprocess.check_output(["/bin/sh", "-c", text], env={}, cwd="/", text=True)
    assert found == f"{state}\n{name}\n/\n"


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1bb", "a\udcffb"])
def test_a_line_break_in_a_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="Nothing was changed"):
        make_boot_command(Path("/tmp") / name)


def test_folders_of_one_name_have_services_of_their_own(tmp_path: Path) -> None:
    names = {make_boot_command(tmp_path / parent / "jobs").name for parent in ("a", "b")}
    assert len(names) == 2
    assert all(name.startswith("holdfast-jobs-") for name in names)
