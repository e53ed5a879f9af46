"""What a newcomer meets first: commands from notes, and the first answers."""
