"""Place of a thread: the operation that it is in, and the line of the user's script that led there; pure."""

from __future__ import annotations

import re
import sysconfig
from enum import Enum

from msgspec import Struct

from holdfast.watch.hang.stacks import Frame, Thread

_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3(?:\.\d+)?/|^<(?:frozen|__array|eval_with)|^<string>$"
)
_TORCH = re.compile(r"(?:^|/)torch/(.*)$")
_HOLDFAST = re.compile(r"(?:^|/)holdfast/([a-z_/]+)\.py$")
_COMPILERS = re.compile(r"/torch/(?:_dynamo|_inductor|_functorch|fx/experimental)/|/triton/|/torch/export/")
_COMPILING = re.compile(r"/torch/(?:_dynamo/convert_frame|_inductor/compile_fx)\.py$")
"""Files whose functions compile. The others of compilers also run the compiled code, in each step."""
_EVALUATES = re.compile(
    r"(?:^|_)(?:eval|evaluate|evaluation|validate|validation|val|generate)(?:_|$)|^test(?:_(?:step|epoch|loop|model))?$"
)
_DEBUGGERS = (
    "pdb.py",
    "bdb.py",
    "pydevd.py",
    "pydevd_frame.py",
    "ipdb/__main__.py",
    "IPython/core/debugger.py",
)


class Kind(str, Enum):
    """Kind of a place."""

    WAITS = "waits"  # for other ranks
    SYNCS = "syncs"  # the exchange that follows each step
    LOADS = "loads"  # data
    WORKS = "works"  # anything else
    COMPILES = "compiles"
    EVALUATES = "evaluates"
    DEBUGS = "debugs"


class Place(Struct, frozen=True):
    """Place of a thread."""

    kind: Kind  # whether it waits for other ranks
    operation: str  # function of a library that it is in, such as "all_reduce"; "" in the user's own code
    user: Frame | None  # innermost frame of the user's script; None if all frames are those of libraries

    def describe(self) -> str:
        """Return the place as text, such as "all_reduce, called at train.py:88 (step)"."""
        if self.user is None:
            return self.operation or "a place without Python frames"
        name = self.user.file.rpartition("/")[2]
        at = f"{name}:{self.user.line} ({self.user.function})"
        return f"{self.operation}, called at {at}" if self.operation else f"{at}"


def find_place(thread: Thread) -> Place:
    """Return the place of a thread."""
    frames = thread.frames
    user = next((one for one in frames if not _is_library(one)), None)
    inner = frames[: frames.index(user)] if user is not None else frames
    kind, operation = next(filter(None, map(_operation, inner)), None) or (Kind.WORKS, _name_of(inner))
    if kind is not Kind.SYNCS:
        if any(one.file.endswith(_DEBUGGERS) for one in frames):
            kind = Kind.DEBUGS
        elif any(_COMPILERS.search(one.file) for one in inner):
            kind = Kind.COMPILES
        elif any(map(_evaluates, frames)):
            kind = Kind.EVALUATES
    return Place(kind, operation, user)


def frame_kind(frame: Frame) -> Kind | None:
    """Return the kind of place that one frame alone decides; None if the frames around it do."""
    if frame.file.endswith(_DEBUGGERS):
        return Kind.DEBUGS
    if _COMPILING.search(frame.file) and "compil" in frame.function:
        return Kind.COMPILES
    if (found := _operation(frame)) is not None:
        return found[0]
    if _evaluates(frame):
        return Kind.EVALUATES
    return None if _is_library(frame) else Kind.WORKS


def _is_library(frame: Frame) -> bool:
    file = frame.file
    return bool(_LIBRARY.search(file)) or file.startswith(_STDLIB) or bool(_HOLDFAST.search(file))


def _evaluates(frame: Frame) -> bool:
    return bool(_EVALUATES.search(frame.function)) and "train" not in frame.function


def _operation(frame: Frame) -> tuple[Kind, str] | None:
    """Return the kind and name of the operation that a frame decides; None for others."""
    if (found := _HOLDFAST.search(frame.file)) and found[1] == "ranks":
        return Kind.SYNCS, "the exchange of the ranks after a step"
    found = _TORCH.search(frame.file)
    file = found[1] if found else ""
    if file.startswith("distributed/"):
        return Kind.WAITS, frame.function
    if file == "autograd/graph.py" and frame.function == "_engine_run_backward":
        return Kind.WAITS, "backward"  # DistributedDataParallel waits for the gradients of other ranks in it
    return (Kind.LOADS, "DataLoader.__next__") if file.startswith("utils/data/") else None


def _name_of(frames: tuple[Frame, ...]) -> str:
    """Return the name of the operation that other library frames, innermost first, are in."""
    inner = next((one for one in frames if not one.file.startswith(_STDLIB)), None)
    if inner is None:
        return frames[-1].function if frames else ""  # the function of Python that was called
    package = "/".join(inner.file.split("/")[-2:])
    return f"{inner.function} ({package}:{inner.line})"
