"""Attachment of an engine to a home."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from holdfast.adapters.deepspeed.engine import HoldfastEngine
from holdfast.adapters.deepspeed.session import Session, Settings
from holdfast.adapters.deepspeed.support import check_engine
from holdfast.adapters.kit.attachment import check_attach, insert_class
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.errors import InvalidInput, Unsupported

_T = TypeVar("_T")
_DECIDED = {
    "state": "the engine's objects are the state",
    "every": "call engine.save_checkpoint() when a save is due",
    "group": "the ranks are those of the engine",
}


def attach(
    engine: _T,
    home: str | os.PathLike[str] | Home | None = None,
    *,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
    **options: Any,
) -> _T:
    """Have an engine save and load through Holdfast. Returns the same engine.

    `save_checkpoint` and `load_checkpoint` keep their arguments. The object gets a class in which
    `HoldfastEngine` comes directly before its own.

    Args:
        engine: engine of `deepspeed.initialize`.
        home: folder or URL of the run's checkpoints; by default `holdfast` in the folder that is given to
            `save_checkpoint` and `load_checkpoint`.
        client_state: returns the client state of the save after a preemption notice. Without it that save
            waits for the next call of `save_checkpoint`, unless the last one did not have a client state.
        options: other options of `Checkpointer`, such as `keep`, `memory` or `preemption`. By default all
            checkpoints are kept, as by DeepSpeed.

    Raises:
        InvalidInput: the object is not an engine, is already attached, or an option does not fit.
        Unsupported: the engine keeps its state in a way that Holdfast does not save.

    Ranks: every rank calls it; not collective.
    """
    check_attach(engine, HoldfastEngine, options, _DECIDED, name="engine")
    if options.get("local") is not None:
        raise Unsupported(
            "attach() does not take local=: a rank loads files that another rank has saved, so all are read "
            "from home. The engine was not changed. Leave local= out."
        )
    if client_state is not None and not callable(client_state):
        raise InvalidInput(
            f"client_state= must be a function that returns the client state, got "
            f"{type(client_state).__name__}. The engine was not changed. Write client_state=lambda: ..."
        )
    check_engine(engine)
    settings = Settings(None if home is None else parse_home(home), client_state, options)
    attached = insert_class(engine, HoldfastEngine, before=type(engine))
    attached.holdfast_session = Session(attached, settings)
    return engine
