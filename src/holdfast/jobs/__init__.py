"""Keeps a job alive: task files, the life of a job as a pure machine, and the engines that run it."""
