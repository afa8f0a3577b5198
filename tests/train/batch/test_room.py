"""How much memory there is: the machine's, or less where a control group says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from holdfast.train.batch.room import find_limit, free_host_bytes

GiB = 2**30


def make_root(path: Path, groups: str, files: Mapping[str, object]) -> Path:
    """A machine with 8 GiB available, in these control groups."""
    files = {
        "proc/meminfo": f"MemTotal: {16 * GiB // 1024} kB\nMemAvailable: {8 * GiB // 1024} kB\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{text}")
    return path


def test_without_limits_it_is_what_is_available(tmp_path: Path) -> None:
    assert free_host_bytes(make_root(tmp_path, "0::/user\n", {})) == 8 * GiB
    unlimited = {"sys/fs/cgroup/user/memory.max": "max\n"}
    assert free_host_bytes(make_root(tmp_path / "2", "0::/user\n", unlimited)) == 8 * GiB


def test_the_tightest_control_group_around_it_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    inner, outer = "sys/fs/cgroup/job/task", "sys/fs/cgroup/job"
    files = {
        f"{inner}/memory.max": 4 * GiB,
        f"{inner}/memory.current": GiB,
        f"{inner}/memory.stat": "anon 5\ninactive_file 0\n",
        f"{outer}/memory.max": 5 * GiB,
        f"{outer}/memory.current": 4 * GiB,
        f"{outer}/memory.stat": f"anon 5\ninactive_file {GiB}\n",
    }
    assert free_host_bytes(make_root(tmp_path, "0::/job/task\n", files)) == 2 * GiB


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory/job"
    files = {
        f"{top}/memory.limit_in_bytes": 3 * GiB,
        f"{top}/memory.usage_in_bytes": GiB,
        f"{top}/memory.stat": "cache 1\ntotal_inactive_file 0\n",
    }
    groups = "5:cpu:/other\n3:memory:/job\n"
    assert free_host_bytes(make_root(tmp_path, groups, files)) == 2 * GiB


def test_ranks_of_a_host_share_what_is_free() -> None:
    cpu = torch.device("cpu")
    alone, shared = (find_limit(cpu, 0, num_sharing=num) for num in (1, 4))
    assert 0 < shared < alone / 2
