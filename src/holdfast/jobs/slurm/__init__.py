"""Jobs on a Slurm cluster: Slurm allocates the nodes, Holdfast runs and requeues the job."""
