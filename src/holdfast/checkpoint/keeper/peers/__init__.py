"""Copies of a rank's files in the memory of keepers on other hosts, its peers. No torch."""
