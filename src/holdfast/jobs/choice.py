"""Which engine a user means by `--on`, and which one has a job: all share one row of numbers."""

from __future__ import annotations

from holdfast.errors import InvalidInput
from holdfast.jobs.engine import Engine, Job
from holdfast.jobs.place import database, state_dir
from holdfast.jobs.records import Records

ENGINES = ("local", "slurm", "sky")
"""As `--on` has them."""


def choose_engine(name: str = "local") -> Engine:
    """The engine of a name.

    Raises:
        InvalidInput: there is none of that name.
    """
    if name == "local":
        from holdfast.jobs.local.engine import LocalEngine

        return LocalEngine()
    if name == "slurm":
        from holdfast.jobs.slurm.engine import SlurmEngine

        return SlurmEngine()
    if name == "sky":
        from holdfast.jobs.sky.engine import SkyEngine

        return SkyEngine()
    raise InvalidInput(f"There is no engine {name!r}. Expected one of: {', '.join(ENGINES)}.")


def find_engine(number: int) -> Engine:
    """The engine that has a job.

    Raises:
        NotFound: there is no job with this number.
    """
    with Records(database(state_dir())) as records:
        return choose_engine(records.get(number).engine)


def all_jobs() -> list[Job]:
    """The jobs of all engines, the newest last; only engines that have any are asked."""
    with Records(database(state_dir())) as records:
        engines = sorted({record.engine for record in records.all()})
    found = [job for name in engines for job in choose_engine(name).jobs()]
    return sorted(found, key=lambda job: job.id)
