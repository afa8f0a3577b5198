"""Checks of a node before an attempt: disks, free space and memory, copies, products, clock."""
