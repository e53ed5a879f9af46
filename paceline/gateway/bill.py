"""What the key of a request is charged for: tokens, and which engines made them.

Once for the prompt and for what was said, whatever was tried for it: the prompt at the first engine
that said something, and of the answer to each engine what it made. Counts are the engines' own as
far as they lived to tell them; otherwise the prompt is estimated from its bytes, and of an answer
every part that was relayed is a token, or four bytes of one that came whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from paceline.gateway.kinds import TEXT_PATHS, is_vectors
from paceline.gateway.leg import Leg
from paceline.gateway.money import Used
from paceline.gateway.routes import Site
from paceline.gateway.splice import Splice
from paceline.gateway.usage import text_bytes, used_by

__all__ = ["Bill"]

_BYTES_PER_TOKEN: Final = 4


class Bill:
    """Of one request. What it says holds once the request is over.

    Args:
        prompt_tokens: as estimated.
        splice: what came of the answer; None: it is not streamed.
        deferred: tokens that it may have, where it is made in the background.
    """

    def __init__(
        self, path: str, prompt_tokens: float, splice: Splice | None, deferred: int = 0
    ) -> None:
        self._path, self._splice, self._deferred = path, splice, deferred
        self._estimate = round(prompt_tokens)
        # engines whose part is over, and the tokens of the answer until then
        self._parts: list[tuple[Site, int]] = []
        # of a whole answer
        self._told: Used | None = None
        # what an engine itself has counted; None: nothing
        self.counted: Used | None = None

    def goes_on_behind(self, site: Site) -> None:
        """What ``site`` made of the answer stands; another engine makes the rest."""
        assert self._splice is not None, "a stream goes on"
        self._parts.append((site, self._splice.num_output_tokens))

    def used(self, leg: Leg | None) -> Used:
        """In all; ``leg``: the last one, None: no engine was asked."""
        if leg is None:
            return Used()
        # who hangs up has had an engine at work, whatever it had said until then
        began = leg.was_abandoned and leg.was_sent
        splice = self._splice
        if splice is None or (leg.is_answer and not leg.streams):
            # engines answer some requests for a stream whole
            if self._told is None and leg.is_answer:
                body = bytes(leg.body)
                self.counted = used_by(self._path, body)
                self._told = self.counted or self._estimated(body)
            return self._told or Used(self._estimate if began else 0)
        output, prompt = splice.num_output_tokens, splice.prompt_tokens
        if prompt is not None:
            self.counted = Used(prompt, splice.cached_tokens, output)
        if prompt is None:
            # the engine did not live to count it, or counts nothing
            prompt = self._estimate if output or began else 0
        return Used(prompt, splice.cached_tokens, output)

    def _estimated(self, body: bytes) -> Used:
        """Of a whole answer that has no counts."""
        if self._path not in TEXT_PATHS:
            return Used(self._estimate if is_vectors(self._path) else 0)
        made = math.ceil(text_bytes(body) / _BYTES_PER_TOKEN)
        return Used(self._estimate, 0, max(made, self._deferred))

    def shares(self, leg: Leg | None) -> Sequence[tuple[Site, Used]]:
        """By engine, the first one's with the prompt; empty: nobody answered, and it costs
        nothing."""
        used = self.used(leg)
        began = leg is not None and leg.was_abandoned and leg.was_sent
        if leg is None or not (used.output or leg.is_answer or began):
            return ()
        found: list[tuple[Site, Used]] = []
        before = 0
        for site, until in (*self._parts, (leg.site, used.output)):
            # no more than there are in all: a count at the end stands over what was relayed
            made = max(0, min(until, used.output) - before)
            before += made
            if not found:
                found.append((site, Used(used.prompt, used.cached, made)))
            elif made:
                found.append((site, Used(output=made)))
        return found
