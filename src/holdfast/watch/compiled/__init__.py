"""Compile cache of a run: output of torch.compile that travels with the checkpoints."""
