"""Jobs: task files, the pure state machine of a job, and the engines that run it."""
