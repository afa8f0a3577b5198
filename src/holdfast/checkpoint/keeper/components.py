"""Components of a keeper that all of its work shares: configuration, stores, reports and watches."""

from __future__ import annotations

from msgspec import Struct

from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.checkpoint.keeper.reports import Reports
from holdfast.checkpoint.keeper.watch import KeeperWatches
from holdfast.checkpoint.store import Store


class KeeperComponents(Struct, frozen=True):
    """Components of one keeper."""

    config: KeeperConfig
    inbox: TrainerInbox
    reports: Reports
    watches: KeeperWatches
    store: Store  # of the nearest tier
    home: Store | None = None  # if that is another tier
