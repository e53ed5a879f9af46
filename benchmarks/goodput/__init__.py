"""Requests served as promised: streams of them, rates to ask, and what answers come to."""
