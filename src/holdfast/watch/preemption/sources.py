"""Sources of notices, from the user's setting or the machine's vendor; ends that come at a given time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from typing_extensions import override

from holdfast.errors import InvalidInput
from holdfast.system.environment import PREEMPTION
from holdfast.system.linux.program_runs import run_program
from holdfast.system.units import format_duration, parse_duration
from holdfast.watch.preemption.clouds import GCP_VALUES, Aws, Azure, Gcp, Ray, ray_context
from holdfast.watch.preemption.notice import Cloud, Notice, Unreachable

_LEAST_LEAD_S, _MARGIN_S = 60.0, 30.0
"""Shortest time from the notice to the end, and what is added to twice the time of a step and a save."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 300.0
_SQUEUE_S = 60.0
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", re.ASCII)


class End(Cloud):
    """An end that comes closer. Its notice leaves time for twice a step and a durable save.

    At the end of a short time the notice comes not before half of the time that was left at first.

    Args:
        name: of the source.
        detail: of its notice.
        left_s: returns the time left in seconds, or None without a limit.
    """

    pause_s = _LEAST_PAUSE_S

    def __init__(self, name: str, detail: str, left_s: Callable[[], float | None]) -> None:
        self.name, self._detail, self._left_s = name, detail, left_s
        self._most_lead_s: float | None = None

    @override
    def poll(self) -> Notice | None:
        left_s = self._left_s()
        if left_s is None:
            self.pause_s = _MOST_PAUSE_S
            return None
        if self._most_lead_s is None:
            self._most_lead_s = left_s / 2
        lead_s = min(max(_LEAST_LEAD_S, 2 * self.save_s + _MARGIN_S), self._most_lead_s)
        if left_s <= lead_s:
            detail = f"{self._detail} in {format_duration(max(left_s, 0.0))}"
            return Notice(self.name, detail, time.time() + left_s)
        # Half of the way: the end may move closer, and a save may take longer than before.
        self.pause_s = min(max((left_s - lead_s) / 2, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        return None


def deadline(after_s: float) -> End:
    """Return the end at a time from now, the start of the training."""
    end_s = time.monotonic() + after_s
    return End("deadline", "time is over", lambda: end_s - time.monotonic())


class SlurmLimit:
    """Time limit of this Slurm job, read from `squeue`: a changed one is followed.

    While Slurm does not answer, or where a container lacks squeue, the last answer counts, else
    SLURM_JOB_END_TIME.
    """

    def __init__(self) -> None:
        self._end_s: float | None = None
        self._is_unlimited = False

    def left_s(self) -> float | None:
        """Return the time left; None without a limit."""
        text = _squeue_left(os.environ["SLURM_JOB_ID"])
        found = _LEFT.fullmatch(text)
        if found is not None:
            days, hours, minutes, seconds = (int(group or 0) for group in found.groups())
            self._end_s = time.monotonic() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
            self._is_unlimited = False
        elif text == "UNLIMITED":
            self._is_unlimited = True
        elif self._end_s is None and not self._is_unlimited:
            end = os.environ.get("SLURM_JOB_END_TIME", "")
            if not end.isdecimal():
                raise Unreachable(f"squeue gives no time left for job {os.environ['SLURM_JOB_ID']}: {text!r}")
            self._end_s = time.monotonic() + int(end) - time.time()
        return None if self._is_unlimited or self._end_s is None else self._end_s - time.monotonic()


def slurm() -> End:
    """Return the end of this Slurm job."""
    return End("slurm", "time limit", SlurmLimit().left_s)


def _is_in_slurm_job() -> bool:
    """Return True in a job of Slurm whose end can be found."""
    environment = os.environ
    return "SLURM_JOB_ID" in environment and (
        shutil.which("squeue") is not None or "SLURM_JOB_END_TIME" in environment
    )


def _squeue_left(job_id: str) -> str:
    """Return the time left of a job as squeue prints it, or an empty string."""
    words = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%L"]
    try:
        done = run_program(words, timeout_s=_SQUEUE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.text if done.status == 0 else ""


_DMI_FOLDER = Path("/sys/class/dmi/id")  # of strings that name the machine's vendor
_CLOUDS_BY_DMI = {  # the third is the same on every machine of that cloud
    ("sys_vendor", "Amazon EC2"): "aws",
    ("product_name", "Google Compute Engine"): "gcp",
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"): "azure",
}
NAMES = ("auto", "none", "aws", "gcp", "azure", "ray", "slurm", "deadline=DURATION", "file:PATH")
"""Names of sources. `aws=URL` polls another address than the cloud's own, for tests and proxies."""
_CLOUDS: dict[str, Callable[[str], list[Cloud]]] = {
    "aws": lambda base: [Aws(base)],
    "gcp": lambda base: [Gcp(name, base) for name in GCP_VALUES],
    "azure": lambda base: [Azure(base)],
    "ray": lambda _: [Ray()],
    "deadline": lambda after: [deadline(parse_duration(after, "deadline="))],
    "slurm": lambda _: [slurm()],
}


class Sources(Struct, frozen=True):
    """Sources of notices other than signals."""

    clouds: tuple[Cloud, ...] = ()
    files: tuple[Path, ...] = ()


def parse_sources(value: str | Iterable[str] | None, *, dmi_folder: Path = _DMI_FOLDER) -> Sources:
    """Return the sources that a user names; see `Preemption`."""
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
            own = "ray" if ray_context() is not None else _own_cloud(dmi_folder)
            clouds += _CLOUDS[own]("") if own else []
            clouds += [slurm()] if _is_in_slurm_job() else []
        elif name == "slurm" and not _is_in_slurm_job():
            raise InvalidInput(
                "The source slurm of preemption notices needs a Slurm job: SLURM_JOB_ID, and squeue or "
                "SLURM_JOB_END_TIME. Found none. Leave it out, or use auto."
            )
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
