"""Registry of engines: lookup by name or job id. All engines share one id sequence."""

from __future__ import annotations

from importlib import import_module

from holdfast.errors import InvalidInput
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import state_dir
from holdfast.jobs.recorded import RecordedEngine
from holdfast.jobs.records import ENGINE_NAMES, Records

_CLASSES = (
    "holdfast.jobs.local.engine:LocalEngine",
    "holdfast.jobs.slurm.engine:SlurmEngine",
    "holdfast.jobs.sky.engine:SkyEngine",
    "holdfast.jobs.k8s.engine:K8sEngine",
    "holdfast.jobs.k8s.engine:KubeflowEngine",
)
ENGINES = dict(zip(ENGINE_NAMES, _CLASSES, strict=True))  # by name, as in `--on`; imported when used


def get_engine(name: str = "local") -> RecordedEngine:
    """Return the engine with a name."""
    if name not in ENGINES:
        raise InvalidInput(f"Unknown engine {name!r}. Expected one of: {', '.join(ENGINES)}.")
    module, _, kind = ENGINES[name].partition(":")
    return getattr(import_module(module), kind)()


def find_engine(number: int) -> RecordedEngine:
    """Return the engine of a job."""
    return get_engine(Records(state_dir()).get(number).job.engine)


def all_jobs() -> list[Job]:
    """Return the jobs of all engines, newest last. Only engines that have jobs are queried."""
    engines = sorted({record.job.engine for record in Records(state_dir()).all()})
    found = [job for name in engines for job in get_engine(name).jobs()]
    return sorted(found, key=lambda job: job.id)
