"""The room for rules about what is in a home: keeper, restore and adapters use it. No torch."""
