"""Settings of an attached Trainer: the home of the run, and the options of its Checkpointer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.adapters.transformers.data_feed import DataFeed
from holdfast.checkpoint.run.options import Home


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one Trainer. `options` are those of the Checkpointer that the Trainer does not decide.

    `feed` replaces the order of the Trainer's data, if it is given.
    """

    home: Home
    folders: bool | Literal["all"]
    options: Mapping[str, Any]
    feed: DataFeed | None = None
