"""Jobs on the user's own SkyPilot, which finds machines and restarts jobs."""
