"""Requests that meet their targets: streams of requests, search over rates, and figures."""
