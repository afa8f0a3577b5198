"""Containers of jobs with an image: one per node, kept between attempts, joined by the commands."""
