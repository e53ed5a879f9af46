"""What both ends of a connection read the same way: no sockets, no clocks, nothing else of ours."""
