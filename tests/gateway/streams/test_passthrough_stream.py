"""Streams that are passed on unchanged, but for a cascade's note in their last event."""

import json

import pytest

from paceline.gateway.streams.passthrough_stream import PASSTHROUGH

NOTE = {"cascade": {"by": "small"}}


@pytest.mark.parametrize("last", ["{}", "{ }", '{"type":"message_stop"}', '{"type":"x" }'])
def test_a_note_leaves_the_last_event_json(last: str) -> None:
    relay = PASSTHROUGH["/v1/messages"]()
    relay.annotate(NOTE)
    relay.begin_attempt()
    told = relay.feed(f"event: message_stop\ndata: {last}\n\n".encode())
    head, _, data = told.partition(b"data: ")
    assert head == b"event: message_stop\n"
    assert json.loads(data) == {**json.loads(last), "paceline": NOTE}
