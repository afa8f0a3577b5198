"""Checkpoints of a run: formats, stores, the state and its copy, the keeper, restore, and the run itself."""
