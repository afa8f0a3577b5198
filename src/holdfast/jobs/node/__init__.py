"""What any engine needs on each machine of a job: folder, workdir, mounts, and the warden that runs it."""
