"""Folder whose `sitecustomize.py` Python imports at each start."""
