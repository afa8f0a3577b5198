"""Service of a state folder: a systemd user unit or a line of cron continues its jobs after a restart."""
