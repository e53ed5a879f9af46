"""First contact with the server: commands from notes of other servers, and first answers."""
