"""Machines of all jobs: attempts that they have lost, failed checks, and the ones that stand out."""
