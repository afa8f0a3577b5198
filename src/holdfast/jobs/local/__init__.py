"""Jobs on this machine: nodes are process trees, truth is a SQLite file, nobody needs to stay logged in."""
