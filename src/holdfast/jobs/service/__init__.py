"""Service of a state folder: a systemd user unit continues its jobs after a restart of the machine."""
