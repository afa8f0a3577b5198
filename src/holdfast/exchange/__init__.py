"""Other formats <-> checkpoints: import and export, streaming, with the memory of a few chunks."""
