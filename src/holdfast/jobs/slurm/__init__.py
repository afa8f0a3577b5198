"""Jobs on a Slurm cluster: Slurm gives and takes the machines, we run on them and say when to come back."""
