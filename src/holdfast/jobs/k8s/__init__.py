"""Manifests for Kubernetes from task files: a Job, a JobSet or a PyTorchJob, which the user applies."""
