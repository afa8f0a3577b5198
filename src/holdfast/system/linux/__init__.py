"""Linux interfaces that several rooms need: processes, locks, atomic files, mounts and wakeup pipes."""
