"""Where bytes live: one small contract, one file per place, behaviours that wrap any of them."""

from holdfast.store.contract import Entry, Properties, Store
from holdfast.store.place import open_store

__all__ = ["Entry", "Properties", "Store", "open_store"]
