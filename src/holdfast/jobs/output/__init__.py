"""Output of jobs: a log per node, limited in size, with times, read in blocks of lines."""
