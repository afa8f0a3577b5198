"""Jobs on this machine. Nodes are process trees, the state is in files, and no login is needed."""
