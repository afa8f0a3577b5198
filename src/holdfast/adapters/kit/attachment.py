"""Attachment to an object of another library: its version, its options, and a class inserted into it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from holdfast.errors import InvalidInput, ResumeWarning, Unsupported
from holdfast.system.callsite import warn


def check_versions(extra: str, oldest: Mapping[str, tuple[int, int]]) -> None:
    """Check that the packages of an extra, each with its oldest supported version, are installed."""
    for name, least in oldest.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            if find_spec(name) is not None:
                continue  # a source folder on the path has no version
            found = None
        if found is None or tuple(int(part) for part in found.split(".")[:2]) < least:
            state = "it is not installed" if found is None else f"{found} is installed"
            raise Unsupported(
                f"holdfast.adapters.{extra} needs {name} {'.'.join(map(str, least))} or later, and {state}. "
                f"Run: pip install 'torch-holdfast[{extra}]'."
            )


def check_attach(
    target: Any, added: type, options: Mapping[str, Any], decided: Mapping[str, str], *, name: str
) -> None:
    """Check the arguments of an adapter's `attach`. An object is attached once.

    `decided` are options that the object decides, each with the place to set it.
    """
    going = next((one.name for one in options.get("watches") or () if one.goes_back is not None), None)
    if going is not None:
        raise InvalidInput(
            f"attach() of this {name} does not take a watch that goes back, as {going!r} does: the loop, its "
            "counter of steps and its data belong to the trainer, which cannot go back while it runs. "
            'Nothing was changed. Use Spike("report") (the default), stop at the report, and start again '
            "from the newest healthy checkpoint; or train in a loop of your own over Checkpointer.steps()."
        )
    for option, fix in decided.items():
        if option in options:
            raise InvalidInput(f"attach() does not take {option}=: {fix}. The {name} was not changed.")
    if isinstance(target, added):
        raise InvalidInput(f"This {name} is already attached. Call attach() once.")


def insert_class(target: Any, added: type, *, before: type) -> Any:
    """Insert a class into the class of an object, directly before one of its bases. Returns the object.

    Methods of classes derived from `before` still run first, and their `super()` calls reach `added`. If
    `before` is the class of the object itself, those of `added` run first.
    """
    kind: type = type(target)
    bases = (added, kind) if kind is before else (kind, added)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # Data loaders of Accelerate have a property `__class__`, which cannot be set.
    object.__dict__["__class__"].__set__(target, type(kind.__name__, bases, names))
    return target


def unwrapped(value: Any) -> Any:
    """Return what Accelerate's wrapper of an optimizer or a scheduler contains; anything else as it is."""
    from accelerate.optimizer import AcceleratedOptimizer  # here, since not every trainer needs Accelerate
    from accelerate.scheduler import AcceleratedScheduler

    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    return value.scheduler if isinstance(value, AcceleratedScheduler) else value


def warn_of_persistent_workers(option: str) -> None:
    """Warn of an option that keeps the workers of a loader after an epoch."""
    warn(
        f"The run will not resume exactly within an epoch, because of {option}=True: a loader draws a seed "
        "for its workers when it starts them, from the generator of dropout. After a resume they start "
        f"at another moment. Set {option}=False, or give the loader a generator of its own.",
        ResumeWarning,
    )
