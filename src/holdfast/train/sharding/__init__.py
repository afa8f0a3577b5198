"""Data parallelism as one knob over FSDP2: from whole copies on every rank to one copy shared by all."""
