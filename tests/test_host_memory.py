"""Available host memory: the machine's, or less where a control group limits it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.system.host_memory import available_bytes, total_bytes

GiB = 2**30


def make_root(path: Path, groups: str, files: Mapping[str, object]) -> Path:
    """Write the files of a machine with 8 GiB available and these control groups."""
    files = {
        "proc/meminfo": f"MemTotal: {16 * GiB // 1024} kB\nMemAvailable: {8 * GiB // 1024} kB\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{text}")
    return path


def test_without_a_limit_the_available_memory_of_the_machine_counts(tmp_path: Path) -> None:
    assert available_bytes(make_root(tmp_path, "0::/user\n", {})) == 8 * GiB
    unlimited = {"sys/fs/cgroup/user/memory.max": "max\n"}
    assert available_bytes(make_root(tmp_path / "2", "0::/user\n", unlimited)) == 8 * GiB


def test_the_total_is_that_of_the_machine_or_of_the_tightest_control_group(tmp_path: Path) -> None:
    assert total_bytes(make_root(tmp_path / "1", "0::/job/task\n", {})) == 16 * GiB
    limits = {"sys/fs/cgroup/job/task/memory.max": "max\n", "sys/fs/cgroup/job/memory.max": 5 * GiB}
    assert total_bytes(make_root(tmp_path / "2", "0::/job/task\n", limits)) == 5 * GiB
    legacy = {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": 3 * GiB}
    assert total_bytes(make_root(tmp_path / "3", "4:memory:/job\n0::/\n", legacy)) == 3 * GiB


def test_the_tightest_control_group_counts_and_its_reclaimable_cache_is_available(tmp_path: Path) -> None:
    inner, outer = "sys/fs/cgroup/job/task", "sys/fs/cgroup/job"
    files = {
        f"{inner}/memory.max": 4 * GiB,
        f"{inner}/memory.current": GiB,
        f"{inner}/memory.stat": "anon 5\ninactive_file 0\n",
        f"{outer}/memory.max": 5 * GiB,
        f"{outer}/memory.current": 4 * GiB,
        f"{outer}/memory.stat": f"anon 5\ninactive_file {GiB}\n",
    }
    assert available_bytes(make_root(tmp_path, "0::/job/task\n", files)) == 2 * GiB


def test_control_groups_of_version_1_are_read(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory/job"
    files = {
        f"{top}/memory.limit_in_bytes": 3 * GiB,
        f"{top}/memory.usage_in_bytes": GiB,
        f"{top}/memory.stat": "cache 1\ntotal_inactive_file 0\n",
    }
    groups = "5:cpu:/other\n3:memory:/job\n"
    assert available_bytes(make_root(tmp_path, groups, files)) == 2 * GiB
