"""Drafts from answers that the same caller got before.

A question asked again mostly gets the same answer, and an agent prints the same file with few
changes. So finished answers are kept, each after the end of its prompt, in one ring for each tenant
and cache salt; the tokens after the longest match with a request's latest tokens are drafted::

    ring     ..the sky? user | It is blue # ..2 + 2? user | It is four # -1 -1 -1
                                            ^ the next answer goes on here, and later overwrites
    request  ..2 + 2? user |                                ^ found by the hash of its last 16, 8, 4
                                                              or 2 tokens, and compared

No lookup reads the ring of another tenant or salt. Memory is bounded in all and for each tenant;
the ring that was useless for longest is dropped for a new one.

This module does not know models, steps, or how many draft tokens are worth their time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, Final, NamedTuple

import numpy as np

from paceline.core.drafter import NO_DRAFT, DraftTokens
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepNote
from paceline.core.request import FinishReason, Request
from paceline.errors import ConfigError

__all__ = ["SOURCE", "AnswerDrafter", "FinishedAnswers", "Owner"]

# its name in statistics
SOURCE: Final = "finished_answers"
_KEY: Final = "finished_answers_bytes"
_USUAL_BYTES: Final = 16 << 20
# bytes that may be configured, other than 0
_LEAST_BYTES: Final = 128 << 10
_MOST_BYTES: Final = 1 << 30
# a tenant has at most 1/n of all, or it could drop everybody else's answers
_TENANT_SHARE: Final = 3
# tokens of the smallest ring, and of the largest; rings double in size, between two steps
_SMALLEST: Final = 1024
_LARGEST: Final = 1 << 20
# most tokens of the time before a ring grew that one call indexes, as a step waits
_INDEXED: Final = 2048
# tokens of a prompt's end that are kept with its answer: they identify the question
_CONTEXT: Final = 32
# most tokens of one answer that are kept, as it is stored between two steps
_MOST_TOKENS: Final = 16_384
# lengths of matches to look for; the search begins with the longest
_LENGTHS: Final = (2, 4, 8, 16)
# separator after each answer; not a token
_END: Final = -1
_WORD: Final = 2**64 - 1
# odd numbers without a pattern: the factor of the polynomial that hashes tokens, and of its mixer
_FACTOR: Final = 0x9E3779B97F4A7C15
_MIXER: Final = 0xD6E8FEB86659FD93
# weights of tokens in a hash, the latest token first
_POWERS: Final = tuple(_FACTOR**back & _WORD for back in range(_LENGTHS[-1]))
# hashes for each token that a ring may hold: with fewer, one in three would soon be overwritten
_HASHES: Final = 2
# a token, and a position for each length
_BYTES_PER_TOKEN: Final = 4 * (1 + _HASHES * len(_LENGTHS))


class Owner(NamedTuple):
    """Owner of kept answers."""

    tenant: str
    salt: str | None


class _Ring:
    """The answers of one owner.

    Args:
        capacity: tokens, a power of two.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # a match was found here, or a second answer came
        self.was_of_use = False
        # unwritten positions are never read, so their memory is not touched
        self._tokens = np.zeros(capacity, dtype=np.int32)
        # by length and hash, the position after the latest such tokens. It may have been
        # overwritten, or belong to other tokens with the same hash, so tokens are compared; if
        # another hash entry replaced it, a shorter match is found
        self._places = np.zeros((len(_LENGTHS), _HASHES * capacity), dtype=np.int32)
        self._shift = 64 - ((_HASHES * capacity).bit_length() - 1)
        self._next = 0
        # positions from before it grew that are not in ``_places`` yet
        self._left = 0, 0

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + self._places.nbytes

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more tokens overwrite nothing."""
        return self._next + count < self.capacity

    def grown(self) -> _Ring:
        """Return a ring twice as large, with the answers up to the latest: after a wrap, older ones
        behind it are dropped. Later calls index the answers, and they can be found after that."""
        ring = _Ring(2 * self.capacity)
        ring._tokens[: self._next] = self._tokens[: self._next]
        ring._next = self._next
        ring._left = 0, self._next
        ring.was_of_use = self.was_of_use
        return ring

    def add(self, tokens: Sequence[int]) -> None:
        """Store fewer tokens than the capacity. The oldest answers are overwritten."""
        first = self._next
        self.was_of_use = first > 0
        self._catch_up()
        if not self.has_room(len(tokens)):
            # an answer is stored in one piece
            self._tokens[first:] = _END
            first = 0
            # from here on, later positions do not hold older tokens any more
            self._left = 0, 0
        self._next = last = first + len(tokens) + 1
        self._tokens[first : last - 1] = tokens
        self._tokens[last - 1] = _END
        self._index(first, last)

    def find(self, tokens: Sequence[int], count: int) -> DraftTokens:
        """Return up to ``count`` tokens after the latest occurrence of the longest match."""
        self._catch_up()
        tail = list(tokens[-_LENGTHS[-1] :])
        latest_first = tail[::-1]
        total = before = 0
        buckets: list[int] = []
        for length in _LENGTHS:
            if length > len(tail):
                break
            total += sum(map(mul, latest_first[before:length], _POWERS[before:length]))
            before = length
            buckets.append((total * _MIXER & _WORD) >> self._shift)
        for row in range(len(buckets) - 1, -1, -1):
            length, place = _LENGTHS[row], self._places.item(row, buckets[row])
            if place < length or self._tokens[place - length : place].tolist() != tail[-length:]:
                continue
            following = self._tokens[place : place + count].tolist()
            if _END in following:
                following = following[: following.index(_END)]
            if following:
                self.was_of_use = True
                return DraftTokens(following, length, SOURCE)
        return NO_DRAFT

    def _catch_up(self) -> None:
        first, end = self._left
        if first < end:
            last = min(end, first + _INDEXED)
            self._index(max(0, first - _LENGTHS[-1]), last, older=True)
            self._left = last, end

    def _index(self, first: int, last: int, *, older: bool = False) -> None:
        """Index the tokens of these positions, answers as a whole; ``older``: they were stored
        before the positions that are indexed already."""
        text = self._tokens[first:last]
        words = text.astype(np.uint64)
        # hashes of the tokens before each position, the nearest with the least power, see ``find``
        hashes = np.zeros_like(words)
        power = 1
        for length in range(1, min(_LENGTHS[-1] + 1, len(words))):
            hashes[length:] += words[: len(words) - length] * np.uint64(power)
            power = power * _FACTOR & _WORD
            if length in _LENGTHS:
                # where something follows; of equal hashes the last is kept
                behind = length + np.flatnonzero(text[length:] != _END)
                buckets = (hashes[behind] * np.uint64(_MIXER)) >> np.uint64(self._shift)
                row, at = _LENGTHS.index(length), buckets.astype(np.int64)
                found = first + behind
                if older:
                    found = np.maximum(found, self._places[row, at])
                self._places[row, at] = found


class AnswerDrafter:
    """A ``Drafter`` of one request, which may live longer than its owner's ring."""

    def __init__(self, answers: FinishedAnswers, owner: Owner) -> None:
        self._answers = answers
        self.owner = owner

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        return self._answers.find(self.owner, tokens, count)


class FinishedAnswers:
    """All kept answers. A ``Recorder``: it gets every request and its end. Used from the engine's
    thread alone.

    Args:
        max_bytes: of all rings; one tenant has at most a third of it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes
        self._most_of_tenant = max_bytes // _TENANT_SHARE
        # the most recently useful one comes last
        self._rings: OrderedDict[Owner, _Ring] = OrderedDict()
        self._bytes_of: dict[str, int] = {}
        self.num_bytes = 0
        # requests whose answers will be kept
        self._open: dict[str, tuple[Request, Owner]] = {}

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> FinishedAnswers | None:
        """Make them if ``speculative_config`` has the method auto, unless it says 0 bytes.

        Raises ConfigError for an invalid number of bytes."""
        if config is None or config.get("method") != "auto":
            return None
        size = config.get(_KEY, _USUAL_BYTES)
        is_number = isinstance(size, int) and not isinstance(size, bool)
        if not is_number or not (size == 0 or _LEAST_BYTES <= size <= _MOST_BYTES):
            raise ConfigError(
                f"speculative_config: {_KEY} must be 0 or a whole number from {_LEAST_BYTES} to "
                f"{_MOST_BYTES}, got {size!r}"
            )
        return cls(size) if size else None

    def drafter(self, tenant: str, salt: str | None) -> AnswerDrafter:
        """Return a request's drafter, which reads its owner's answers; its own answer will be
        kept."""
        return AnswerDrafter(self, Owner(tenant, salt))

    def find(self, owner: Owner, tokens: Sequence[int], count: int) -> DraftTokens:
        """Return drafts like ``Drafter.propose``, from this owner's answers alone."""
        ring = self._rings.get(owner)
        if ring is None:
            return NO_DRAFT
        self._rings.move_to_end(owner)
        return ring.find(tokens, count)

    # ------------------------------------------------------------------ as a recorder

    def added(self, request: Request, now: float) -> None:
        drafter = request.asked.drafter
        if isinstance(drafter, AnswerDrafter):
            self._open[request.request_id] = request, drafter.owner

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        """Do nothing."""

    def stepped(
        self,
        plan: SchedulerOutput,
        planned: float,
        done: float,
        seconds: float,
        updates: Sequence[RequestUpdate],
    ) -> None:
        for update in updates:
            if update.finish_reason is not None:
                self._end(update.request_id)

    def ended(self, request_ids: Sequence[str], now: float) -> None:
        for request_id in request_ids:
            self._end(request_id)

    def close(self) -> None:
        """Do nothing."""

    # ------------------------------------------------------------------ keeping

    def _end(self, request_id: str) -> None:
        """Keep the answer, if it is complete or reached its maximum length."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return
        request, owner = entry
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            context = request.asked.prompt_token_ids[-_CONTEXT:]
            self._keep(owner, [*context, *request.output_token_ids[:_MOST_TOKENS]])

    def _keep(self, owner: Owner, tokens: Sequence[int]) -> None:
        ring = self._rings.get(owner)
        if ring is None:
            self._drop_for(owner, _SMALLEST * _BYTES_PER_TOKEN)
            ring = self._put(owner, _Ring(_SMALLEST))
        while not ring.has_room(len(tokens)) and ring.capacity < _LARGEST:
            # the ring doubles, so it needs its own size again
            if not self._clear_for(owner, ring.num_bytes):
                break
            self._drop_for(owner, ring.num_bytes)
            ring = self._put(owner, ring.grown())
        ring.add(tokens[: ring.capacity - 1])
        self._rings.move_to_end(owner)

    def _clear_for(self, owner: Owner, size: int) -> bool:
        """Whether a ring may grow by ``size`` within its tenant's share, after dropping the
        tenant's other rings that were never useful."""
        over = self._bytes_of[owner.tenant] + size - self._most_of_tenant
        useless = [
            each
            for each, ring in self._rings.items()
            if each.tenant == owner.tenant and each != owner and not ring.was_of_use
        ]
        if over > sum(self._rings[each].num_bytes for each in useless):
            return False
        for each in useless:
            if over <= 0:
                break
            over -= self._rings[each].num_bytes
            self._drop(each)
        return True

    def _drop_for(self, owner: Owner, size: int) -> None:
        """Free ``size`` bytes: drop first the tenant's other rings, then those of any tenant, the
        ones that were useless for longest first."""
        others = [each for each in self._rings if each != owner]
        for each in [each for each in others if each.tenant == owner.tenant]:
            if self._bytes_of.get(owner.tenant, 0) + size <= self._most_of_tenant:
                break
            self._drop(each)
        for each in others:
            if self.num_bytes + size <= self._most:
                break
            self._drop(each)

    def _put(self, owner: Owner, ring: _Ring) -> _Ring:
        self._drop(owner)
        self._rings[owner] = ring
        self.num_bytes += ring.num_bytes
        self._bytes_of[owner.tenant] = self._bytes_of.get(owner.tenant, 0) + ring.num_bytes
        return ring

    def _drop(self, owner: Owner) -> None:
        ring = self._rings.pop(owner, None)
        if ring is None:
            return
        self.num_bytes -= ring.num_bytes
        self._bytes_of[owner.tenant] -= ring.num_bytes
        if not self._bytes_of[owner.tenant]:
            del self._bytes_of[owner.tenant]
