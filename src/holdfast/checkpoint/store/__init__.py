"""Storage of named bytes: one small contract, one file per kind of place, and stores that wrap others."""

from holdfast.checkpoint.store.contract import ObjectInfo, Properties, Store
from holdfast.checkpoint.store.factory import open_store

__all__ = ["ObjectInfo", "Properties", "Store", "open_store"]
