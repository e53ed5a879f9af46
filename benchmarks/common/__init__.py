"""Code shared by benchmarks: processes, one way to start a server and wait for it, one client,
loads, statistics, the machine."""
