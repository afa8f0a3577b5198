"""The way back: find the newest good checkpoint, read what is needed, verify it, fill live tensors."""
