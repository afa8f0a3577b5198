"""Kit of the doors to other trainers: attachment, the run, its notices, and files of others."""
