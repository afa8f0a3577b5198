"""Notifications: new statuses of a job, sent to commands and webhooks by a process of its own."""
