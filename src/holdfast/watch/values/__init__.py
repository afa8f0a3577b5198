"""Health of saved states: finite tensors, norms, and recorded losses without a spike. No torch."""
