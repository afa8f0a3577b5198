"""~/sky_workdir in commands: the path of the job's own workdir takes its place."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidInput
from holdfast.jobs.task.model import is_plain, path_in_workdir, replace_sky_workdir
from holdfast.jobs.task.parser import parse_tasks


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("cd ~/sky_workdir", "cd /w"),
        ("cd ~/sky_workdir/sub && ls", "cd /w/sub && ls"),
        ('cd "$HOME/sky_workdir"; ls ${HOME}/sky_workdir', 'cd "/w"; ls /w'),
        ("python -c 'open(expanduser(\"~/sky_workdir/a\"))'", "python -c 'open(expanduser(\"/w/a\"))'"),
        ("export PYTHONPATH=$PYTHONPATH:~/sky_workdir:x", "export PYTHONPATH=$PYTHONPATH:/w:x"),
        ("(cd ~/sky_workdir)&&cat<~/sky_workdir/a", "(cd /w)&&cat</w/a"),
    ],
)
def test_the_path_of_the_workdir_replaces_it(command: str, expected: str) -> None:
    assert replace_sky_workdir(command, "/w") == expected


@pytest.mark.parametrize(
    "command",
    [
        *(f"cd {path}" for path in ("~/sky_workdir_2", "~/sky_workdir.bak", "~/sky_workdir-old")),
        *(f"cd {path}" for path in ("/home/me/sky_workdir", "~me/sky_workdir")),
        "rsync out host:~/sky_workdir/",  # of another machine
        "ls ~/sky_workdir/../other",  # in the home
    ],
)
def test_other_paths_stay(command: str) -> None:
    assert replace_sky_workdir(command, "/w") == command


def test_paths_that_a_shell_would_change_are_recognized() -> None:
    assert is_plain("/home/me/.local/state/holdfast/jobs/3/nodes/0/workdir")
    assert not any(is_plain(path) for path in ("/my files/a", "/a'b", "/a$b", "/a*"))


def test_a_mount_below_it_is_in_the_workdir() -> None:
    task = parse_tasks("run: x\nfile_mounts: {~/sky_workdir/data/a: /tmp, ~/b: /tmp}\n", "task.yaml").only()
    assert [mount.target for mount in task.file_mounts] == ["data/a", "~/b"]
    assert path_in_workdir("~/sky_workdir/../a") is None
    with pytest.raises(InvalidInput, match="this is the workdir itself"):
        parse_tasks("run: x\nfile_mounts: {~/sky_workdir: /tmp}\n", "task.yaml")
