"""What a state is made of: its fields and their roles, how `setup` makes it, how it prints."""
