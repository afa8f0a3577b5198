"""Bytes <-> values: the on-disk format as pure functions; no I/O, no torch. Normative: docs/format.md."""
