"""Task files: SkyPilot's YAML, parsed strictly, with line numbers in all errors."""
