"""Spikes of the recorded loss and norms of gradients: reported, or answered by going back. No torch."""
