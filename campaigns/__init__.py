"""Long searches for failures: fuzzing, crash states, torn copies, damage and kills."""
