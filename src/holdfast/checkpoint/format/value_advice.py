"""Advice for values that cannot be saved, with a form that can; pure, and imports none of their types."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

_BUILT_IN = (dict, list, tuple, set, frozenset, str, bytes, int, float)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CREATED = (types.ModuleType, BaseException, types.TracebackType, types.FrameType)
_RESOURCES = frozenset({"_thread", "_io", "threading", "socket", "subprocess", "concurrent", "asyncio"})
_BY_TYPE = {
    "omegaconf": "Save OmegaConf.to_container(config) instead.",
    "numpy.rec.recarray": "Save its view([(name, dtype), ...], numpy.ndarray).",
    "numpy.ma.MaskedArray": "Save its .data and its .mask.",
    "numpy.matrix": "Save numpy.asarray() of it.",
    "numpy.random.bit_generator.SeedSequence": "Save its .state, a dict, and make it of that again.",
    "functools.partial": "Save its arguments, and make it again with these.",
    "array.array": "Save its tolist(), or bytes() of it.",
    "builtins.memoryview": "Save bytes() of it.",
    "re.Pattern": "Save its .pattern and .flags, and compile it again.",
    "io.StringIO": "Save its getvalue().",
    "torch.Tensor": "Tensors cannot be keys of a dict, nor items of a set: use item(), or a list of pairs.",
    "torch.storage.UntypedStorage": "Save a tensor of it: torch.empty(0, dtype=torch.uint8).set_(storage).",
}
"""Advice by package or full name of a type."""


def advice_for(value: Any) -> str:
    """Return the advice for a value that cannot be saved."""
    kind = type(value)
    full = f"{kind.__module__.removeprefix('_')}.{kind.__qualname__}"
    found = _BY_TYPE.get(full) or _BY_TYPE.get(full.partition(".")[0])
    if found is not None:
        return found
    if isinstance(value, _FUNCTIONS):
        return "Save its name as text, and look it up again by that, or leave it out of the state."
    for method in ("to_dict", "model_dump"):  # of configurations in transformers and pydantic
        if callable(getattr(value, method, None)):
            return f"Save the dict that its .{method}() returns."
    plain = _plain_type(value)
    if plain is not None:
        return f"Save {plain}() of it, and make a {kind.__qualname__} of that again."
    return _of_others(value)


def _plain_type(value: Any) -> str | None:
    """Return the name of the built-in type that can have a value's content."""
    found = next((base.__name__ for base in _BUILT_IN if isinstance(value, base)), None)
    if found is None and isinstance(value, Mapping):
        return "dict"
    is_sized = hasattr(value, "__len__") and hasattr(value, "__iter__")
    return "list" if found is None and is_sized and _is_built_in(value) else found


def _of_others(value: Any) -> str:
    module = type(value).__module__
    if isinstance(value, _CREATED) or module.partition(".")[0] in _RESOURCES:
        return "Leave it out of the state, and create it again at each start."
    if isinstance(value, Iterator):
        return "Save the position in what it reads, or use one with state_dict() and load_state_dict()."
    if module.startswith("numpy.random") and isinstance(getattr(value, "state", None), dict):
        return "Save the generator that draws from it: numpy.random.Generator(...)."
    if _is_built_in(value) or module.partition(".")[0] in (*sys.stdlib_module_names, "torch", "numpy"):
        return "Save it as text or numbers, and make it of these again, or leave it out of the state."
    return "Add state_dict() and load_state_dict() to the object, or leave it out of the state."


def _is_built_in(value: Any) -> bool:
    """Return True for an object of a type written in C, whose methods are fixed."""
    return not type(value).__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
