"""Adapters: interfaces of other libraries that store their state in Holdfast checkpoints."""
