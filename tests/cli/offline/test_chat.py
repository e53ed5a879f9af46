"""The conversation, over an engine whose tokens are computed by hand, and the command in a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.cli.offline.chat import Conversation
from paceline.cli.offline.repetition import Repetition
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.errors import NeverFitsError, RequestFailedError
from tests.cli.conftest import Command

NULL = ("--backend", "null")
# the page has the same rule
VECTORS = Path(__file__).parents[2] / "ui" / "vectors" / "repeats.json"
CHAT = (sys.executable, "-m", "paceline.cli.main", "chat", *NULL)


def talk(
    body: Callable[[Conversation], Awaitable[Any]],
    *,
    system: str | None = None,
    max_tokens: int = 6,
    **backend: Any,
) -> Any:
    async def main() -> Any:
        client = null_client(NullBackend(**({"vocab_size": 259, "block_size": 4} | backend)))
        try:
            conversation = Conversation(
                client,
                system=system,
                max_tokens=max_tokens,
                temperature=0.0,
                sampling={},
                seed=0,
            )
            result = await body(conversation)
            async with asyncio.timeout(10):
                while client.stats.scheduler.num_running or client.num_unfinished:
                    await asyncio.sleep(0.01)
            return result
        finally:
            await client.close()

    return asyncio.run(main())


async def say(conversation: Conversation, text: str) -> str:
    return "".join([piece async for piece in conversation.answer(text)])


def expected(turns: list[dict[str, str]], count: int = 6) -> str:
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode(tokenizer.render_chat(turns), add_special_tokens=False)
    return tokenizer.decode(expected_tokens(prompt, count, 259))


def test_an_answer_that_repeats_itself_is_stopped_and_can_go_on() -> None:
    """The null model says 0 for ever once it was said."""

    async def body(conversation: Conversation) -> tuple[str, str, str, str]:
        first = await say(conversation, "\0" * 40)
        why = conversation.stopped
        await say(conversation, "")
        return first, why, conversation.turns[-1]["content"], conversation.stopped

    # a millisecond a step: the reader sees the repetition long before the last token is there
    first, why, whole, after = talk(
        body, max_tokens=1000, num_blocks=1000, max_model_len=3000, step_time=0.001
    )
    assert why == "stopped: the answer repeats itself" and len(first) < 1000
    assert whole.startswith(first) and after == "stopped after 1000 tokens"
    # a few tokens are no character by themselves
    assert 990 < len(whole) - len(first) <= 1000


def test_what_repeats_itself() -> None:
    def found(text: str) -> bool:
        watched = Repetition()
        return any(watched.add(letter) for letter in text)

    told = json.loads(VECTORS.read_text(encoding="utf-8"))
    assert all(map(found, told["repeats"])) and not any(map(found, told["goes_on"]))
    assert found("你好" * 90)
    assert not found(" ".join(f"The {'day' * (n % 5)} of {n * n} is here." for n in range(20)))
    assert not found("-" * 100 + "\n" + " " * 300 + "x")
    assert not found("la femme au roi, " * 6)


def test_sampling_defaults_hold_in_a_terminal_too(command: Command) -> None:
    def told(name: str, value: float) -> str:
        given = json.dumps({name: value})
        model = "smollm2-135m"
        return command(
            "run", *NULL, "--override-generation-config", given, "--stats", model, "hi"
        ).stderr

    for name in ("top_k", "min_p", "repetition_penalty"):
        assert f"{name} must be" in told(name, -1)
    assert "(3 tokens, " in told("max_new_tokens", 3)


def test_each_answer_continues_the_whole_conversation() -> None:
    async def body(conversation: Conversation) -> list[dict[str, str]]:
        await say(conversation, "one")
        await say(conversation, "two")
        return conversation.turns

    turns = talk(body, system="short")
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant"]
    system = [{"role": "system", "content": "short"}]
    assert turns[1]["content"] == expected([*system, *turns[:1]])
    assert turns[3]["content"] == expected([*system, *turns[:3]])


def test_reset_forgets() -> None:
    async def body(conversation: Conversation) -> tuple[str, str]:
        first = await say(conversation, "one")
        conversation.reset()
        return first, await say(conversation, "one")

    first, again = talk(body)
    assert first == again == expected([{"role": "user", "content": "one"}])


def test_the_oldest_turns_are_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(conversation: Conversation) -> list[dict[str, str]]:
        for text in ("first", "second", "third"):
            await say(conversation, text)
        return conversation.turns

    turns = talk(body, max_model_len=80)
    assert turns[0] == {"role": "user", "content": "second"}
    assert "dropped the 1 oldest" in capsys.readouterr().err


def test_a_message_that_never_fits_is_refused_and_not_kept() -> None:
    async def body(conversation: Conversation) -> list[dict[str, str]]:
        with pytest.raises(NeverFitsError, match=r"has \d+ tokens and the context has room for 64"):
            await say(conversation, "x" * 100)
        return list(conversation.turns)

    assert talk(body, max_model_len=64) == []


def test_a_failed_answer_is_an_error_and_the_engine_lives() -> None:
    async def body(conversation: Conversation) -> str:
        with pytest.raises(RequestFailedError, match="poison"):
            await say(conversation, "!")
        assert conversation.turns == []
        return await say(conversation, "fine")

    assert talk(body, poison_token=ord("!")) == expected([{"role": "user", "content": "fine"}])


def test_a_stopped_answer_frees_its_blocks_and_stays_said() -> None:
    async def body(conversation: Conversation) -> list[dict[str, str]]:
        async def first_piece() -> None:
            async for piece in conversation.answer("go on"):
                if piece:
                    started.set()

        started = asyncio.Event()
        task = asyncio.create_task(first_piece())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return conversation.turns

    # talk() waits for the engine to be idle: 3000 steps of 5 ms would take longer than it does
    turns = talk(body, max_tokens=3000, step_time=0.005)
    assert [turn["role"] for turn in turns] == ["user", "assistant"]


def test_a_pipe_gets_answers_and_nothing_else(command: Command) -> None:
    chat = ("chat", *NULL, "--max-tokens", "5")
    once = command(*chat, "--temperature", "0", stdin="hello\n")
    assert (once.returncode, once.stderr) == (0, "")
    assert once.stdout.endswith("\n") and len(once.stdout) > 1
    twice = command(*chat, stdin="hello\n\n/reset\nhello\n/exit\nhello\n")
    assert twice.returncode == 0
    assert twice.stdout == once.stdout * 2
    assert twice.stderr == "(forgotten)\n"


def test_commands_do_what_they_say_and_others_are_told() -> None:
    """On a terminal; in a pipe what is no command is said to the model."""
    terminal = Terminal("--max-tokens", "5", "--temperature", "0")
    terminal.until(b"/help lists the commands")
    terminal.until(b"> ")
    for line, shown in (
        (b"/help", b"/retry              answer the last message once more"),
        (b"/nonsense", b"(there is no command /nonsense; /help lists them"),
        (b"/retry", b"(there is no message to repeat yet)"),
        (b"/temperature 0.5", b"(temperature 0.5)"),
        (b"/temperature hot", b"(/temperature: "),
        (b"/temperature 0", b"(temperature 0)"),
        (b"/system Be short.", b"(system prompt set)"),
        (b"/system", b"(no system prompt)"),
        (b"hello", b"(5 tokens, "),
        (b"/reset", b"(forgotten)"),
    ):
        terminal.type(line + b"\n")
        terminal.until(shown)
        terminal.until(b"> ")
    terminal.type(b"/bye\n")
    assert terminal.close() == 0


def test_commands_in_a_pipe(command: Command) -> None:
    chat = ("chat", *NULL, "--max-tokens", "5", "--temperature", "0")
    once = command(*chat, stdin="hello\n")
    again = command(*chat, stdin="hello\n/retry\n")
    assert again.stdout == once.stdout * 2
    told = command(*chat, "--system", "x", stdin="hello\n")
    late = command(*chat, stdin="/system x\nhello\n/reset\n/system\nhello\n")
    assert late.stdout == told.stdout + once.stdout != once.stdout * 2
    # a path, an unknown word, and a slash that is meant
    for line, message in (("/a/b c", "/a/b c"), ("/nonsense", "/nonsense"), ("//reset", "/reset")):
        text = expected([{"role": "user", "content": message}], 5)
        assert command(*chat, stdin=f"{line}\n").stdout.startswith(text.splitlines()[0]), line


def test_how_quick_an_answer_was_is_told_when_asked_for(command: Command) -> None:
    flags = ("--max-tokens", "11", "--temperature", "0", "--null-step-time", "0.02")
    done = command("chat", *NULL, *flags, "--stats", stdin="hello\n")
    (line,) = done.stderr.splitlines()
    found = re.fullmatch(r"\((\d+) tokens, ([\d.]+) tokens/s, the first after [\d.]+ s\)", line)
    assert found is not None and found[1] == "11" and 5 < float(found[2]) < 51, line


def test_bytes_that_are_no_text_are_no_traceback() -> None:
    command = [sys.executable, "-m", "paceline.cli.main", "chat", "--backend", "null"]
    done = subprocess.run(
        [*command, "--max-tokens", "5", "--temperature", "0"],
        input=b"caf\xe9\nhello\n",
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.splitlines()) >= 2


def test_a_refused_turn_in_a_pipe_is_one_line_and_an_exit_code() -> None:
    done = subprocess.run(
        [*CHAT, "--max-model-len", "100", "--max-tokens", "5"],
        input="x" * 200 + "\nhi\n",
        capture_output=True,
        text=True,
        timeout=60,
        encoding="utf-8",
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "the context has room for 100" in done.stderr
    assert done.stdout


class Terminal:
    """``paceline chat`` on a terminal of its own."""

    def __init__(self, *flags: str) -> None:
        self._master, slave = pty.openpty()
        # the first terminal that a new session opens is the one whose Ctrl-C reaches it
        shell = f"exec {shlex.join([*CHAT, *flags])} <{os.ttyname(slave)} >{os.ttyname(slave)} 2>&1"
        self.process = subprocess.Popen(
            ["sh", "-c", shell], start_new_session=True, env=os.environ | {"TERM": "dumb"}
        )
        # not before it is open at the other end, or reading here would see its end
        self.shown = b""
        self.until(b"loading null ...")
        os.close(slave)

    def until(self, text: bytes, more: int = 0) -> None:
        """Read until ``text`` and ``more`` bytes after it have been shown; forgets them."""
        deadline = time.monotonic() + 30
        while (place := self.shown.find(text)) < 0 or len(self.shown) < place + len(text) + more:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._master], [], [], 1.0)[0]:
                self.shown += os.read(self._master, 4096)
        self.shown = self.shown[place + len(text) + more :]

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self._master)


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on() -> None:
    # 4000 steps of 10 ms: only Ctrl-C ends it in time
    terminal = Terminal("--max-tokens", "4000", "--null-step-time", "0.01", "--temperature", "0")
    terminal.until(b"> ")
    terminal.type(b"hello\n")
    terminal.until(b"hello\r\n", more=5)
    terminal.type(b"\x03")
    terminal.until(b"(stopped)")
    terminal.until(b"> ")
    terminal.type(b"again\n")
    terminal.until(b"again\r\n", more=5)
    terminal.type(b"\x03")
    terminal.until(b"(stopped)")
    terminal.until(b"> ")
    terminal.type(b"\x04")
    assert terminal.close() == 0
