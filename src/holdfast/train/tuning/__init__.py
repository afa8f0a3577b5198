"""Profile of a training: host syncs, graph breaks, padding, data loading and torch.compile."""
