"""Finite values: the tensors of each checkpoint are checked, and their norms compared. No torch."""
