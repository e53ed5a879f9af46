"""Formats that both ends of a connection parse alike: no sockets, clocks or imports of ours."""
