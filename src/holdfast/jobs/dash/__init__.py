"""Dash: a page of jobs and runs, which a local server shows to one user's browser. No torch."""
