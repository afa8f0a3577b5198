"""Task files: SkyPilot's YAML, read strictly, with the line of everything that is wrong."""
