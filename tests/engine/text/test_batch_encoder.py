"""Texts that wait together are encoded together, in turns, and off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from paceline.engine.testing import ByteTokenizer
from paceline.engine.text.batch_encoder import BatchEncoder
from paceline.errors import InvalidRequestError


class Gated(ByteTokenizer):
    """Notes batches, each of which waits to be let through."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.special: list[bool] = []

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        self.batches.append(list(texts))
        self.special.append(add_special_tokens)
        self.began.release()
        assert self.gate.acquire(timeout=30)
        if "bad" in texts:
            raise InvalidRequestError("the text is not valid Unicode: bad")
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


def ids_of(*texts: str, special: bool = False) -> list[list[int]]:
    tokenizer = ByteTokenizer()
    return [tokenizer.encode(text, add_special_tokens=special) for text in texts]


def ask(encoder: BatchEncoder, *texts: str, special: bool = False) -> asyncio.Task[list[list[int]]]:
    return asyncio.ensure_future(encoder.encode(texts, add_special_tokens=special))


async def until(semaphore: threading.Semaphore) -> None:
    """Without holding up the loop, on which the encoder lives."""
    assert await asyncio.to_thread(semaphore.acquire, timeout=30)


async def test_texts_that_come_in_one_turn_of_the_loop_make_one_batch() -> None:
    tokenizer = Gated()
    encoder = BatchEncoder(tokenizer)
    tokenizer.gate.release(9)
    one, two = ask(encoder, "a", "b"), ask(encoder, "c")
    assert await one == ids_of("a", "b") and await two == ids_of("c")
    assert tokenizer.batches == [["a", "b", "c"]]
    encoder.close()


async def test_texts_that_come_meanwhile_make_the_next_batch() -> None:
    tokenizer = Gated()
    encoder = BatchEncoder(tokenizer, threads=1)
    first = ask(encoder, "first")
    await until(tokenizer.began)
    later = [ask(encoder, f"later {i}") for i in range(5)]
    await asyncio.sleep(0)
    tokenizer.gate.release(2)
    assert await first == ids_of("first")
    assert await asyncio.gather(*later) == [ids_of(f"later {i}") for i in range(5)]
    assert tokenizer.batches == [["first"], [f"later {i}" for i in range(5)]]
    encoder.close()


async def test_a_second_thread_goes_on_beside_a_long_text() -> None:
    tokenizer = Gated()
    encoder = BatchEncoder(tokenizer, threads=2)
    long = ask(encoder, "x" * 500)
    await until(tokenizer.began)
    short = ask(encoder, "short")
    await until(tokenizer.began)
    assert tokenizer.batches == [["x" * 500], ["short"]]
    tokenizer.gate.release(2)
    assert await asyncio.gather(long, short) == [ids_of("x" * 500), ids_of("short")]
    encoder.close()


async def test_a_batch_is_bounded_and_callers_take_turns() -> None:
    tokenizer = Gated()
    encoder = BatchEncoder(tokenizer, most_chars=10, threads=1)
    many = ask(encoder, *(f"many{i}" for i in range(5)))
    few, long = ask(encoder, "few"), ask(encoder, "long" * 5)
    tokenizer.gate.release(9)
    assert await many == ids_of(*(f"many{i}" for i in range(5)))
    assert await few == ids_of("few") and await long == ids_of("long" * 5)
    assert tokenizer.batches == [
        # two of five characters are all that there is room for
        ["many0", "many1"],
        ["few", "many2"],
        # no other has room beside a text that is longer than a batch
        ["long" * 5],
        ["many3", "many4"],
    ]
    encoder.close()


async def test_special_tokens_are_for_those_that_want_them() -> None:
    tokenizer = Gated()
    encoder = BatchEncoder(tokenizer, threads=1)
    tokenizer.gate.release(9)
    asked = [ask(encoder, text, special=text in "bd") for text in "abcd"]
    found = await asyncio.gather(*asked)
    assert found == [ids_of(text, special=text in "bd") for text in "abcd"]
    assert tokenizer.batches == [["a", "c"], ["b", "d"]]
    assert tokenizer.special == [False, True]
    encoder.close()


async def test_a_bad_text_fails_its_caller_alone() -> None:
    tokenizer = Gated()
    encoder = BatchEncoder(tokenizer)
    tokenizer.gate.release(9)
    good, bad, other = ask(encoder, "a", "b"), ask(encoder, "c", "bad"), ask(encoder, "d")
    assert await good == ids_of("a", "b") and await other == ids_of("d")
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        await bad
    encoder.close()


async def test_a_caller_that_is_gone_is_not_encoded_for() -> None:
    tokenizer = Gated()
    encoder = BatchEncoder(tokenizer, most_chars=4, threads=1)
    first, gone, last = ask(encoder, "1234"), ask(encoder, "gone", "gone"), ask(encoder, "last")
    await until(tokenizer.began)
    gone.cancel()
    await asyncio.sleep(0)
    tokenizer.gate.release(9)
    assert [await first, await last] == [ids_of("1234"), ids_of("last")]
    assert tokenizer.batches == [["1234"], ["last"]]
    encoder.close()


async def test_no_text_takes_no_thread() -> None:
    encoder = BatchEncoder(Gated())
    assert await encoder.encode([], add_special_tokens=True) == []
    encoder.close()


async def test_callers_that_wait_when_it_is_closed_are_let_go() -> None:
    tokenizer = Gated()
    encoder = BatchEncoder(tokenizer, threads=1)
    under_way = ask(encoder, "a")
    await until(tokenizer.began)
    waiting = ask(encoder, "b")
    await asyncio.sleep(0)
    encoder.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    tokenizer.gate.release(9)
    assert await under_way == ids_of("a"), "it was nearly done"
    with pytest.raises(RuntimeError, match="closed"):
        await encoder.encode(["c"], add_special_tokens=False)


async def test_a_library_that_breaks_leaves_no_caller_waiting() -> None:
    class Broken(ByteTokenizer):
        def encode_batch(
            self, texts: Sequence[str], *, add_special_tokens: bool = True
        ) -> list[list[int]]:
            if "breaks" in texts:
                # as a panic of a library in Rust: no Exception
                raise BaseException("panic")
            return super().encode_batch(texts, add_special_tokens=add_special_tokens)

    encoder = BatchEncoder(Broken(), most_chars=6, threads=1)
    broken, other = ask(encoder, "breaks"), ask(encoder, "other")
    with pytest.raises(BaseException, match="panic"):
        await asyncio.wait_for(broken, 5)
    assert await asyncio.wait_for(other, 5) == ids_of("other")
    encoder.close()
