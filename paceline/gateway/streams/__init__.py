"""Streams of answers, read without sockets: events in, what the caller gets out."""
