"""On-disk format as pure functions between bytes and values: no I/O, no torch. Normative: docs/format.md."""
