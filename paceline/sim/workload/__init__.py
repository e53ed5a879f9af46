"""Workloads: public traces, our own recordings, synthetic arrivals; streamed, equal by seed."""
