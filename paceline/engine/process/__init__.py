"""The engine's process boundary: the loop and its process on one side, the client on the other, and
the messages between them."""
