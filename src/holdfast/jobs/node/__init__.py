"""One machine of a job, for any engine: folder, workdir, mounts, and the agent that runs commands."""
