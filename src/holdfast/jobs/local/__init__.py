"""Jobs on this machine. Nodes are process trees, the state is in SQLite, and no login is needed."""
