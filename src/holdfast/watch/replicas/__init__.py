"""Comparison of the tensors that several ranks hold: which rank has other bytes. No torch."""
