"""Everything that is done to a home: list, read, claim, commit, recover, retain, record. No torch."""
