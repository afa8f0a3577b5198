"""Documents that a standby receives: what to import, what to build, and how a script was started."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from holdfast.system.documents import MAX_TEXT_CHARS, Count

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


class ImportPlan(Struct, frozen=True):
    """Modules to import, in their order, with the path to find them."""

    path: list[Text]
    modules: list[Text]


class ScriptStart(Struct, frozen=True):
    """Start of a script, as its process was started."""

    words: list[Text]
    position: Count  # of the script, or of `-m`, in `words`
    path: list[Text]  # of imports, without the folder of the script
    environment: dict[Text, Text]
    folder: Text
    surroundings: dict[str, Any]
    ignored: list[Text]  # names of signals
    soft_limits: list[int]
    processors: list[int]
    umask: Count


class Recipe(Struct, frozen=True):
    """Call of a function, with all that its result depends on, and the random numbers after it."""

    module: Text
    function: Text
    arguments: bytes  # pickled
    seed: int
    num_threads: int
    before: tuple[bytes, ...]  # states of torch's generators: of the processor, and of the GPU in use
    after: tuple[bytes, ...] = ()


class PrebuildRequest(Struct, frozen=True):
    """Request for the object that a rank builds first, for its next start."""

    path: list[Text]
    environment: dict[Text, Text]
    recipe: Recipe
