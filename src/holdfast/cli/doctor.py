"""`holdfast doctor`: checks whether this machine and a home are ready for training."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.checkpoint.home.claim import read_run_document
from holdfast.checkpoint.home.inventory import is_folder
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.keeper.lockfile import runtime_dir
from holdfast.checkpoint.store.factory import absolute_place, open_store
from holdfast.cli import FOUND, print_note
from holdfast.cli.commands import PATIENCE, argument, command
from holdfast.cli.tables import Column, print_result, print_table, print_text
from holdfast.errors import HoldfastError
from holdfast.jobs.description import describe_check
from holdfast.jobs.node.checks.gate import GPU, GPU_DEVICES, NUM_BYTES, NodeGate, check_home, make_plan
from holdfast.jobs.node.checks.gpu_script import check_device
from holdfast.jobs.node.checks.result import Check
from holdfast.jobs.node_spec import machine_name
from holdfast.system.documents import to_plain
from holdfast.system.units import plural

_LEAST_TORCH = (2, 6)
_FEW_SAVES = 100  # that the limit of open files lets wait in memory
_PINNED_BYTES = 64 << 20
_WRONG = "This machine computes or stores wrong bytes. Do not train on it; test its memory and hardware."
_FIXES = {
    "torch": "Install torch 2.6 or newer in this environment: pip install 'torch>=2.6'.",
    "gpu": "Install a build of torch for this driver; see pytorch.org/get-started.",
    "page lock": "Raise the limit: ulimit -l unlimited; in a container, --ulimit memlock=-1.",
    "open files": "Raise the limit: ulimit -n 65536; in a unit of systemd, LimitNOFILE=65536.",
    "keeper": "Set HOLDFAST_RUNTIME_DIR to a folder on this host that only you can write to.",
    "home": "Check the path or URL, the credentials, and that the place is mounted.",
    "disk": "Choose another place, or set its permissions (chmod u+rwx) and mount options.",
    "space": "Free space, keep fewer checkpoints (keep=), or choose another disk.",
    "memory": "End other processes, or give the container or job more memory.",
    "clock": "Synchronize the clocks of this machine and of its file server (NTP, chrony).",
}
"""Remedy of a failed check, by its name."""


@command(
    "doctor",
    """
    holdfast doctor
    holdfast doctor runs/gpt
    holdfast doctor s3://bucket/gpt --json | jq -r '.checks[] | select(.trouble != "").fix'
    """,
    argument("home HOME", "home to check too; it need not exist yet", nargs="?"),
    PATIENCE,
    details=(
        "Each problem has its fix, and makes the exit status 1. A few MB are written to the disk without a "
        "name; in a bucket, one small object is written and deleted."
    ),
)
def run(args: argparse.Namespace) -> int:
    """Run all checks at the same time, each in a process of its own, and print their results."""
    home = absolute_place(args.home or ".")
    place = next((one for one in (Path(home), *Path(home).parents) if is_folder(str(one))), Path.cwd())
    plan = {GPU: _check_torch, "keeper": _check_keeper} | make_plan(place, Path(tempfile.gettempdir()))
    if is_folder(home):
        plan[f"disk {home}"] = lambda: check_home(home, NUM_BYTES, 1)
    if args.home is not None:
        plan[f"home {home}"] = lambda: _check_home(home)
    if sys.stderr.isatty():
        print_note("checking this machine, which takes some seconds ...")
    checks = NodeGate(machine_name(), plan).wait(lambda: None).checks
    rows = [{**to_plain(check), "fix": _fix(check) if check.trouble else None} for check in checks]
    is_ready = not any(check.trouble for check in checks)
    print_result(args, {"ready": is_ready, "checks": rows}, lambda: _print(checks))
    return 0 if is_ready else FOUND


def _fix(check: Check) -> str:
    return _WRONG if check.is_wrong else _FIXES.get(check.name, "Try again on an idle machine.")


def _print(checks: tuple[Check, ...]) -> None:
    columns = (
        Column("CHECK", lambda check: check.name),
        Column("", lambda check: "PROBLEM" if check.trouble else "ok"),
        Column("WHERE", lambda check: check.where or None, "name"),
        Column("FOUND", lambda check: "see below" if check.trouble else describe_check(check), "text"),
    )
    print_table(columns, checks)
    problems = [check for check in checks if check.trouble]
    for check in problems:
        print()
        print_text(f"{check.name} {check.where}: {check.trouble.rstrip('.')}.")
        print_text(f"Fix: {_fix(check)}", indent="  ")
    print(f"\n{plural(len(problems), 'problem')} found" if problems else "ready")


def _check_torch() -> Iterator[Check]:
    """Yield the results for torch, its GPUs, and the limits that saves depend on."""
    try:
        import torch

        from holdfast.checkpoint.stage.arena import Arena, max_arenas
    except ImportError as error:
        yield Check("torch", "", f"it cannot be imported: {error}")
        return
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < _LEAST_TORCH
    yield Check("torch", str(torch.__version__), "it is too old" if is_old else "")
    num_gpus = torch.cuda.device_count()
    for number in range(num_gpus):
        yield Check(**check_device(torch, torch.device("cuda", number)))
    if num_gpus:
        arena = Arena(0, _PINNED_BYTES)
        arena.pin()
        trouble = (
            "" if arena.is_pinned else "CUDA refused to page-lock memory, so that saves slow down training"
        )
        yield Check("page lock", _limit(resource.RLIMIT_MEMLOCK), trouble)
    else:
        has_driver = any(path.exists() for path in GPU_DEVICES)
        yield Check("gpu", "none", "there is a driver, but torch does not find a GPU" if has_driver else "")
    trouble = f"only {plural(max_arenas(), 'save')} can wait in memory" if max_arenas() < _FEW_SAVES else ""
    yield Check("open files", _limit(resource.RLIMIT_NOFILE), trouble)


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft:,}"


def _check_keeper() -> Iterator[Check]:
    try:
        folder = runtime_dir(f"doctor {os.getpid()}")
        folder.rmdir()
    except (HoldfastError, OSError) as error:
        yield Check("keeper", "", str(error))
    else:
        yield Check("keeper", str(folder.parent))


def _check_home(home: str) -> Iterator[Check]:
    """Yield whether a home can be read, and a bucket be written to. A home may be missing yet."""
    try:
        store = open_store(home)
        read_run_document(store)
        list_home(store)
        if "://" in home:
            store.put(name := f"holdfast-doctor-{os.getpid()}", b"holdfast")
            store.delete(name)
        yield Check("home", home)
    except HoldfastError as error:
        yield Check("home", home, str(error))
