"""Profile of a training: host syncs, graph breaks, padding, batch size, data loading and torch.compile."""
