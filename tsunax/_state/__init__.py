"""The parts of a state: its fields and their roles, how `setup` makes it, how it prints."""
