"""Classes of attached objects: a class of Holdfast is inserted before one of another library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.run.options import parse_spike
from holdfast.errors import InvalidInput


def check_attach(
    target: Any, added: type, options: Mapping[str, Any], decided: Mapping[str, str], *, name: str
) -> None:
    """Check the arguments of an adapter's `attach`.

    Raises:
        InvalidInput: `options` contain one of `decided`, whose values are the places to set them; or `target`
            already has the class `added`.
    """
    check_no_rollback(options, f"attach() of this {name}")
    for option, fix in decided.items():
        if option in options:
            raise InvalidInput(f"attach() does not take {option}=: {fix}. The {name} was not changed.")
    if isinstance(target, added):
        raise InvalidInput(f"This {name} is already attached. Call attach() once.")


def check_no_rollback(options: Mapping[str, Any], place: str) -> None:
    """Refuse to go back in a loop that another library counts.

    Raises:
        InvalidInput: `options` contain `on_spike="rollback"`.
    """
    given = options.get("on_spike", "report")
    if parse_spike(given).action == "rollback":
        raise InvalidInput(
            f'{place} does not take on_spike="rollback": the loop, its counter of steps and its data belong '
            'to the trainer, which cannot go back while it runs. Nothing was changed. Use on_spike="report" '
            "(the default), stop at the report, and start again from the newest healthy checkpoint; or train "
            "in a loop of your own over Checkpointer.steps()."
        )


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
