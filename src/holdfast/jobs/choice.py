"""Which engine a user means by `--on`."""

from __future__ import annotations

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.engine import Engine

ENGINES = ("local", "slurm", "sky")
"""As `--on` has them; only the first is in this version."""


def choose_engine(name: str = "local") -> Engine:
    """The engine of a name.

    Raises:
        InvalidInput: there is none of that name.
        Unsupported: it is not in this version.
    """
    if name not in ENGINES:
        raise InvalidInput(f"There is no engine {name!r}. Expected one of: {', '.join(ENGINES)}.")
    if name != "local":
        raise Unsupported(
            f"The engine {name!r} is not in this version: jobs run on this machine only. `holdfast launch "
            "--dry-run --json` prints the task file as SkyPilot's own parser takes it."
        )
    from holdfast.jobs.local.engine import LocalEngine

    return LocalEngine()
