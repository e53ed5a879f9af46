"""``paceline chat``: a conversation with a model that runs in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import Parser, bounded_float, bounded_int
from paceline.cli.options import add_engine_options, add_model_argument, engine_settings
from paceline.core.errors import NeverFitsError, RequestError, RequestFailedError

if TYPE_CHECKING:
    from paceline.engine.protocol import EngineClient

__all__ = ["Conversation", "add_parser"]

_EPILOG = """\
examples:
  paceline chat                                   type, Enter; Ctrl-D ends
  paceline chat --system 'Answer in one sentence.'
  echo 'Name three colours.' | paceline chat --temperature 0
  paceline chat ./my-model.gguf --threads 4

in a conversation:
  /reset    forget what was said            /exit    leave
  Ctrl-C    stop the answer (at the prompt: leave)

Standard output carries the answers, everything else goes to standard error. Each line of a pipe is
one turn of the conversation.
"""

_HINT = "Type a message; /reset forgets the conversation, /exit leaves."


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in this terminal",
        description="Talk to a model in this terminal, without a server.",
        epilog=_EPILOG,
    )
    add_model_argument(parser)
    group = parser.add_argument_group("answers")
    group.add_argument("--system", metavar="TEXT", help="what the model is told first")
    group.add_argument(
        "--max-tokens",
        type=bounded_int(1),
        default=512,
        metavar="N",
        help="tokens of one answer at most (default 512)",
    )
    group.add_argument(
        "--temperature",
        type=bounded_float(0.0, 100.0),
        default=0.7,
        metavar="T",
        help="0 always takes the likeliest token (default 0.7)",
    )
    group.add_argument(
        "--top-p", type=bounded_float(0.0, 1.0), default=1.0, metavar="P", help="default 1"
    )
    group.add_argument(
        "--seed",
        type=bounded_int(-(2**62), 2**62),
        metavar="N",
        help="repeat the same answers; default: different ones every time",
    )
    add_engine_options(parser, scheduling=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = engine_settings(args, log_level="warning")

    import asyncio
    import random

    from paceline.cli.logs import configure_logging
    from paceline.cli.wiring import build_core, build_tokenizer
    from paceline.engine.local import LocalEngineClient

    configure_logging(settings.log_level)
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"loading {settings.model_name} ...", file=sys.stderr)
    core, info = build_core(settings)
    client = LocalEngineClient(core, info, build_tokenizer(settings))
    seed = random.getrandbits(62) if args.seed is None else args.seed
    conversation = Conversation(
        client,
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=seed,
    )
    if interactive:
        print(_HINT, file=sys.stderr)
    # one loop for the whole conversation: Ctrl-C cancels a turn, not the engine
    with asyncio.Runner() as runner:
        try:
            return _converse(runner, conversation, interactive)
        finally:
            runner.run(client.close())


def _converse(runner: Any, conversation: Conversation, interactive: bool) -> int:
    failed = False
    while True:
        try:
            text = _read(interactive)
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print(file=sys.stderr)
            break
        if not text:
            continue
        if text == "/exit":
            break
        if text == "/reset":
            conversation.reset()
            print("(forgotten)", file=sys.stderr)
            continue
        try:
            runner.run(_say(conversation, text))
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(" (stopped)", file=sys.stderr)
        except (RequestError, RequestFailedError) as error:
            print(f"paceline chat: {error}", file=sys.stderr)
            failed = True
    return 1 if failed and not interactive else 0


def _read(interactive: bool) -> str:
    if interactive:
        # line editing and history, where there is a terminal
        import readline  # noqa: F401

        return input("> ").strip()
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    # whatever the locale; bytes that are no text become U+FFFD
    return line.decode("utf-8", "replace").strip()


async def _say(conversation: Conversation, text: str) -> None:
    async for piece in conversation.answer(text):
        print(piece, end="", flush=True)
    print(flush=True)


class Conversation:
    """The messages so far, and how the next answer is made.

    Args:
        seed: of the first answer; later ones count up from it.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        system: str | None,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> None:
        self._client = client
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._top_p = top_p
        self._seed = seed
        self._num_answers = 0
        # user and assistant in turn
        self.turns: list[dict[str, Any]] = []

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns = []

    async def answer(self, text: str) -> AsyncIterator[str]:
        """The pieces of the answer to ``text``. When it is cancelled, what was said stays said.

        Raises:
            NeverFitsError: ``text`` alone is too long for the model.
            RequestFailedError: the engine failed on this answer.
        """
        from paceline.core.sampling_params import SamplingParams
        from paceline.engine.types import GenerationRequest

        self.turns.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            prompt, max_tokens = self._prompt()
            request = GenerationRequest(
                request_id=f"chat-{self._num_answers}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    max_tokens=max_tokens,
                    temperature=self._temperature,
                    top_p=self._top_p,
                    seed=self._seed + self._num_answers,
                    eos_token_ids=self._client.tokenizer.eos_token_ids,
                ),
                arrival_time=_now(),
            )
            self._num_answers += 1
            async for output in self._client.generate(request):
                for choice in output.choices:
                    if choice.error is not None:
                        raise RequestFailedError(choice.error)
                    if choice.text:
                        said.append(choice.text)
                        yield choice.text
        finally:
            if said:
                self.turns.append({"role": "assistant", "content": "".join(said)})
            else:
                self.turns.pop()

    def _prompt(self) -> tuple[list[int], int]:
        """Token ids to continue, and how many may follow. Forgets the oldest turns when the
        conversation outgrows the context, and says so."""
        tokenizer = self._client.tokenizer
        longest = self._client.info.max_model_len
        forgotten = 0
        while True:
            text = tokenizer.render_chat([*self._system, *self.turns])
            prompt = tokenizer.encode(text, add_special_tokens=False)
            room = longest - len(prompt)
            # a long conversation is worth a shorter answer, but not none
            if room >= min(self._max_tokens, longest // 4):
                break
            if len(self.turns) <= 2:
                if room >= 1:
                    break
                raise NeverFitsError(
                    f"the message takes {len(prompt)} tokens and the context holds {longest}: "
                    "shorten it, or raise --max-model-len",
                    "messages",
                )
            del self.turns[:2]
            forgotten += 1
        if forgotten:
            print(f"(forgot the {forgotten} oldest exchanges: context full)", file=sys.stderr)
        return prompt, min(self._max_tokens, room)


def _now() -> float:
    import time

    return time.monotonic()
