"""The decisions: a pure scheduler. Imports the standard library only, and of it no clock, no
randomness, no threads, no sockets, no environment and no logging."""
