"""Report of a run: a summary computed from its history, and a page that shows it."""
