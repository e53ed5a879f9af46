"""HTTP/1 and nothing else on a connection: ``Upgrade`` is ignored, as RFC 9110 (7.8) lets a server
do, and the request is answered as it is. ADR 26 says why this needs its own reading."""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["PlainProtocol"]


class PlainProtocol(HttpToolsProtocol):
    """uvicorn's protocol, but a head with ``Upgrade`` is treated like any other.

    httptools stops after such a head, and its parser goes on as if another request followed::

        data        | head with Upgrade      | body, or the next request ...
        1st parser    stops here: ^ offset
        2nd parser    the same head without    data[offset:]
                      its Upgrade lines

    So a head that was read is written again, from what the parser understood of it, and a parser
    that sees no upgrade frames the following data by it.
    """

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest: bytes | memoryview = data
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    return
                except HttpParserUpgrade as upgrade:
                    # a view, so that a thousand such requests in one piece are not copied each time
                    rest = memoryview(rest)[upgrade.args[0] :]
                head = self._head_without_upgrade()
                self.parser = HttpRequestParser(self)
                # as uvicorn sets it: data after the last request of a connection is ignored
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        # as uvicorn, which asks for an upgrade once more
        if not self.parser.should_upgrade() and not self.cycle.response_complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
