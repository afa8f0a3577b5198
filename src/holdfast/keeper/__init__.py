"""The process that owns the second half of every save: persist, commit, retain. It never imports torch."""

from holdfast.keeper.client import Images, Keeper, wait_for_let_go
from holdfast.keeper.config import KeeperConfig
from holdfast.keeper.held import HeldStore, end_held
from holdfast.keeper.presence import find_writers, wait_for_orphans
from holdfast.keeper.save import Save

__all__ = [
    "HeldStore",
    "Images",
    "Keeper",
    "KeeperConfig",
    "Save",
    "end_held",
    "find_writers",
    "wait_for_let_go",
    "wait_for_orphans",
]
