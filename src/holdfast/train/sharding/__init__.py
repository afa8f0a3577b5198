"""Data parallelism with FSDP2: from a full copy on every rank to one copy shared by all ranks."""
