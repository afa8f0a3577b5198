"""Jobs on the user's own SkyPilot: it finds machines and comes back to others, we hand it the task."""
