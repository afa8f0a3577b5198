"""Fuzzing of everything that is read from outside: mutated structures, within limits on time and memory."""
