"""Sources of notices, from the user's setting or the machine's vendor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.system.environment import PREEMPTION
from holdfast.system.units import parse_duration
from holdfast.watch.preemption.allocation import Deadline, Slurm, is_in_slurm_job
from holdfast.watch.preemption.clouds import (
    GCP_BASE,
    LINK_LOCAL,
    Aws,
    Azure,
    GcpMaintenance,
    GcpPreemption,
    Ray,
    is_worker,
)
from holdfast.watch.preemption.notice import Cloud

_DMI_FOLDER = Path("/sys/class/dmi/id")
_CLOUDS_BY_DMI = {  # the third is the same on every machine of that cloud
    ("sys_vendor", "Amazon EC2"): "aws",
    ("product_name", "Google Compute Engine"): "gcp",
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"): "azure",
}
NAMES = ("auto", "none", "aws", "gcp", "azure", "ray", "slurm", "deadline=DURATION", "file:PATH")
"""Names of sources. `aws=URL` polls another address than the cloud's own, for tests and proxies."""
_CLOUDS: dict[str, Callable[[str], list[Cloud]]] = {
    "aws": lambda base: [Aws(base or LINK_LOCAL)],
    "gcp": lambda base: [GcpPreemption(base or GCP_BASE), GcpMaintenance(base or GCP_BASE)],
    "azure": lambda base: [Azure(base or LINK_LOCAL)],
    "ray": lambda _: [Ray()],
}


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of notices other than signals."""

    clouds: tuple[Cloud, ...] = ()
    files: tuple[Path, ...] = ()


def parse_sources(value: str | Iterable[str] | None, *, dmi_folder: Path = _DMI_FOLDER) -> Sources:
    """Return the sources that a user names.

    Args:
        value: `aws`, `gcp`, `azure`, `ray`, `slurm` (the time limit of this job), `deadline=DURATION` (from
            the start of the training), `file:PATH`, `none`, or `auto` (Ray Train in its workers, else the
            cloud that runs this machine, if any; and the time limit of a Slurm job). Give several as a
            list, or separated by commas. Default: the environment variable HOLDFAST_PREEMPTION, else `auto`.
        dmi_folder: folder of the kernel's DMI strings, which name the machine's vendor.
    """
    if value is None:
        value = os.environ.get(PREEMPTION, "auto")
    words = value.split(",") if isinstance(value, str) else list(value)
    clouds: list[Cloud] = []
    files: list[Path] = []
    for word in (word.strip() for word in words):
        name, _, base = word.partition("=")
        if word.startswith("file:"):
            files.append(Path(word.removeprefix("file:")).absolute())
        elif name == "auto":
            own = "ray" if is_worker() else _own_cloud(dmi_folder)
            clouds += _CLOUDS[own]("") if own else []
            clouds += [Slurm()] if is_in_slurm_job() else []
        elif name == "deadline":
            clouds.append(Deadline(parse_duration(base, "deadline=")))
        elif name == "slurm":
            if not is_in_slurm_job():
                raise InvalidInput(
                    "The source slurm of preemption notices needs a Slurm job: SLURM_JOB_ID, and squeue or "
                    "SLURM_JOB_END_TIME. Found none. Leave it out, or use auto."
                )
            clouds.append(Slurm())
        elif name in _CLOUDS:
            clouds += _CLOUDS[name](base)
        elif name not in ("none", ""):
            raise InvalidInput(
                f"Unknown source of preemption notices: {word!r}, in preemption= or in {PREEMPTION}. "
                f"Expected: {', '.join(NAMES)}, or several of them separated by commas."
            )
    return Sources(tuple(clouds), tuple(files))


def _own_cloud(dmi_folder: Path) -> str | None:
    """Return the name of the cloud that runs this machine, or None."""
    for (name, expected), cloud in _CLOUDS_BY_DMI.items():
        path = dmi_folder / name
        try:
            if path.read_text(errors="replace").strip() == expected:
                return cloud
        except OSError:
            continue
    return None
