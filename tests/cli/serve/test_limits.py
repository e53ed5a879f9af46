"""Flags of ``paceline serve`` about limits, on a real server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from tests.cli.servers import start_server


def test_limits_hold_without_their_redis_and_an_open_address_is_told() -> None:
    flags = (
        *("--host", "0.0.0.0"),
        *("--rate-limit-requests", "2/day", "--rate-limit-tokens", "1000/day"),
        # no server listens there
        *("--rate-limit-storage", "redis://:hunter2@127.0.0.1:1/0"),
        *("--cors-origin", "https://a.example"),
    )
    answers = []
    with start_server("--backend", "null", *flags) as server:
        for _ in range(3):
            request = urllib.request.Request(
                server.address + "/v1/completions",
                json.dumps({"prompt": "hi", "max_tokens": 2}).encode(),
                {"Content-Type": "application/json", "Origin": "https://a.example"},
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    answers.append((answer.status, dict(answer.headers)))
            except urllib.error.HTTPError as error:
                with error:
                    answers.append((error.code, dict(error.headers)))
        _, metrics = server.request("/metrics")
        server.stop()
    assert [status for status, _ in answers] == [200, 200, 429]
    headers = {name.lower(): value for name, value in answers[1][1].items()}
    assert headers["x-ratelimit-remaining-requests"] == "0"
    # a prompt of three tokens and two of output, twice
    assert int(headers["x-ratelimit-remaining-tokens"]) < 1000
    assert headers["access-control-allow-origin"] == "https://a.example"
    refused = {name.lower(): value for name, value in answers[2][1].items()}
    assert int(refused["retry-after"]) >= 1
    assert "paceline:rate_limit_storage_up 0.0" in metrics
    said = "".join(server.errors)
    assert "rate_limit_storage up=false" in said
    assert "hunter2" not in said
    assert "open address=0.0.0.0" in said and "--api-key-file" in said
