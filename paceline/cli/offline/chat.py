"""``paceline chat``: a conversation with a model that runs in this process."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from paceline.cli.flags.arguments import Parser, bounded_float, bounded_int
from paceline.cli.flags.options import add_engine_options, add_model_argument, engine_settings
from paceline.cli.offline.repetition import Repetition
from paceline.errors import NeverFitsError, RequestError, RequestFailedError

if TYPE_CHECKING:
    from paceline.engine.protocol import EngineClient

__all__ = [
    "HELP",
    "HINT",
    "AnswerStats",
    "Command",
    "Conversation",
    "add_options",
    "add_parser",
    "parse",
    "run",
]

HINT: Final = "Type a message; /help lists the commands, /exit or Ctrl-D leaves."
HELP: Final = """\
/help               this list
/reset              forget what was said
/retry              answer the last message once more
/more               go on with the last answer
/system TEXT        tell the model TEXT first, from the next answer on; without TEXT: nothing
/temperature T      0 always takes the likeliest token
/exit, /bye         leave (Ctrl-D too); Ctrl-C stops an answer
//...               a message that begins with a slash"""

Name = Literal["help", "reset", "retry", "more", "system", "temperature", "exit"]
_NAMES: Final[dict[str, Name]] = {
    "/help": "help", "/?": "help", "/reset": "reset", "/clear": "reset", "/retry": "retry",
    "/more": "more",
    "/system": "system", "/temperature": "temperature", "/exit": "exit", "/bye": "exit",
    "/quit": "exit",
}  # fmt: skip
# a path is not a command: it has another slash
_LOOKS_LIKE_ONE: Final = re.compile(r"/[A-Za-z?-]+")


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its argument."""

    # None: an unknown command
    name: Name | None
    # first word of the line, as typed
    word: str
    rest: str


def parse(line: str) -> Command | str:
    """Parse a line into a command; return it unchanged if it is a message."""
    if line.startswith("//"):
        return line[1:]
    word, _, rest = line.partition(" ")
    if word in _NAMES:
        return Command(_NAMES[word], word, rest.strip())
    return Command(None, word, rest.strip()) if _LOOKS_LIKE_ONE.fullmatch(word) else line


_EPILOG = """\
examples:
  paceline chat                                   type, Enter; Ctrl-D ends
  paceline chat --system 'Answer in one sentence.'
  echo 'Name three colours.' | paceline chat --temperature 0
  paceline chat ./my-model.gguf --threads 4

in a conversation:
{help}

Standard output carries the answers, everything else goes to standard error. Each line of a pipe is
one turn of the conversation.
"""
_COMMANDS = "\n".join(f"  {line}" for line in HELP.splitlines())
# default where the model recommends none
_TEMPERATURE = 0.7
_MAX_TOKENS: Final = 512


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in this terminal",
        description="Talk to a model in this terminal, without a server.",
        epilog=_EPILOG.format(help=_COMMANDS),
    )
    add_options(parser)
    parser.set_defaults(run=run, prompt=[], think=None)


def add_options(parser: Parser) -> None:
    """Add the flags that ``paceline run`` takes too."""
    add_model_argument(parser)
    group = parser.add_argument_group("answers")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument(
        "--max-tokens",
        type=bounded_int(1),
        help=f"longest answer in tokens (default {_MAX_TOKENS})",
    )
    group.add_argument(
        "--temperature",
        type=bounded_float(0.0, 100.0),
        metavar="T",
        help="0 always takes the likeliest token; default: what the model's authors recommend, "
        f"else {_TEMPERATURE}",
    )
    group.add_argument(
        "--top-p",
        type=bounded_float(0.0, 1.0),
        metavar="P",
        help="default: what the model's authors recommend, else 1",
    )
    group.add_argument(
        "--stats",
        action="store_true",
        help="print tokens per second after each answer, in a pipe too",
    )
    group.add_argument(
        "--seed",
        type=bounded_int(-(2**62), 2**62),
        help="seed that makes answers repeatable; default: a random one",
    )
    add_engine_options(parser, scheduling=False)


def run(args: argparse.Namespace) -> int:
    settings = engine_settings(args, log_level="warning")

    import asyncio
    import random

    from paceline.cli.terminal.logs import configure_logging
    from paceline.cli.wiring import build_core, build_tokenizer, default_sampling
    from paceline.engine.local import LocalEngineClient

    configure_logging(settings.log_level)
    prompt = " ".join(args.prompt)
    interactive = sys.stdin.isatty() and not prompt
    if interactive:
        print(f"loading {settings.model_name} ...", file=sys.stderr)
    core, info = build_core(settings)
    client = LocalEngineClient(core, info, build_tokenizer(settings))
    seed = random.getrandbits(62) if args.seed is None else args.seed
    sampling = {"temperature": _TEMPERATURE} | default_sampling(settings)
    for name in ("temperature", "top_p"):
        if getattr(args, name) is not None:
            sampling[name] = getattr(args, name)
    # a model's own limit is for servers, and may be its whole context
    sampling.pop("max_new_tokens", None)
    longest = args.max_tokens or args.override_generation_config.get("max_new_tokens")
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    conversation = Conversation(
        client,
        system=args.system,
        max_tokens=_MAX_TOKENS if longest is None else int(longest),
        temperature=sampling.pop("temperature"),
        sampling=sampling,
        seed=seed,
        template_kwargs={} if args.think is None else {"enable_thinking": args.think == "true"},
    )
    if interactive:
        print(HINT, file=sys.stderr)
    # one loop for the whole conversation: Ctrl-C cancels a turn, not the engine
    with asyncio.Runner() as runner:
        try:
            if prompt:
                given = longest is not None
                return _answer_once(runner, conversation, prompt, args.stats, told=given)
            return _converse(runner, conversation, interactive, interactive or args.stats)
        finally:
            runner.run(client.close())


def _answer_once(
    runner: Any, conversation: Conversation, prompt: str, shows_stats: bool, *, told: bool
) -> int:
    """Answer one question. ``told``: the caller knows how long the answer may be."""
    try:
        runner.run(_say(conversation, prompt))
        if not (told and conversation.reached_limit):
            _tell_why(conversation, "--max-tokens allows a longer answer")
    except (RequestError, RequestFailedError) as error:
        print(f"paceline run: {error}", file=sys.stderr)
        return 1
    if shows_stats and conversation.last is not None:
        print(conversation.last, file=sys.stderr)
    return 0


def _converse(runner: Any, conversation: Conversation, interactive: bool, shows_stats: bool) -> int:
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
        meant = parse(text)
        message: str | None
        if isinstance(meant, str):
            message = meant
        elif meant.name == "more" and conversation.turns:
            # what was said last is gone on with
            message = ""
        elif meant.name is None and not interactive:
            # no user could correct a command from a pipe, so the line is a message
            message = text
        elif meant.name == "exit":
            break
        else:
            message = _carry_out(meant, conversation)
        if message is None:
            continue
        try:
            runner.run(_say(conversation, message))
            if interactive or not conversation.reached_limit:
                _tell_why(conversation, "/more goes on")
            if shows_stats and conversation.last is not None:
                print(conversation.last, file=sys.stderr)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(" (stopped)", file=sys.stderr)
        except (RequestError, RequestFailedError) as error:
            print(f"paceline chat: {error}", file=sys.stderr)
            failed = True
    return 1 if failed and not interactive else 0


def _carry_out(command: Command, conversation: Conversation) -> str | None:
    """Carry out a command and print the result; return a message that is to be answered now."""
    said = ""
    if command.name is None:
        said = f"there is no command {command.word}; /help lists them, // begins a message with /"
    elif command.name == "help":
        print(HELP, file=sys.stderr)
        return None
    elif command.name == "reset":
        conversation.reset()
        said = "forgotten"
    elif command.name == "system":
        conversation.set_system(command.rest or None)
        said = "system prompt set" if command.rest else "no system prompt"
    elif command.name == "temperature":
        try:
            conversation.temperature = bounded_float(0.0, 100.0)(command.rest)
            said = f"temperature {conversation.temperature:g}"
        except argparse.ArgumentTypeError as error:
            said = f"/temperature: {error}"
    elif command.name == "more":
        said = "there is no answer to go on with yet"
    elif command.name == "retry":
        last = conversation.take_back()
        if last is not None:
            return last
        said = "there is no message to repeat yet"
    print(f"({said})", file=sys.stderr)
    return None


def _read(interactive: bool) -> str:
    if interactive:
        # gives input() line editing and history on a terminal
        import readline  # noqa: F401

        return input("> ").strip()
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    # in any locale; invalid bytes become U+FFFD, and a file may begin with a byte order mark
    return line.decode("utf-8-sig", "replace").strip()


def _tell_why(conversation: Conversation, what_next: str) -> None:
    if conversation.stopped:
        print(f"({conversation.stopped}; {what_next})", file=sys.stderr)


async def _say(conversation: Conversation, text: str) -> None:
    """Print the answer to ``text``; of an empty one, how the last answer goes on."""
    async for piece in conversation.answer(text):
        print(piece, end="", flush=True)
    print(flush=True)


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Speed of an answer; ``str`` formats it for users."""

    tokens: int
    # seconds to the first token, and from there to the last
    first_seconds: float
    other_seconds: float

    def __str__(self) -> str:
        from paceline.engine.types import tokens_per_second

        speed = tokens_per_second(self.tokens, 1, self.other_seconds)
        rate = "" if speed is None else f"{speed:.1f} tokens/s, "
        return f"({self.tokens} tokens, {rate}the first after {self.first_seconds:.2f} s)"


class Conversation:
    """The messages so far, and the settings for the next answer.

    Args:
        sampling: fields of ``SamplingParams`` for all answers, without the temperature.
        seed: seed of the first answer; later ones count up from it.
        template_kwargs: arguments of the chat template.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        system: str | None,
        max_tokens: int,
        temperature: float,
        sampling: Mapping[str, Any],
        seed: int,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._client = client
        self.set_system(system)
        self._max_tokens = max_tokens
        self.temperature = temperature
        self._sampling = sampling
        self._seed = seed
        self._template_kwargs = template_kwargs or {}
        self._num_answers = 0
        # user and assistant messages alternate
        self.turns: list[dict[str, Any]] = []
        # speed of the latest answer; None before one is complete
        self.last: AnswerStats | None = None
        # why the latest answer ended before its end; "": it did not
        self.stopped = ""
        # whether that was its length
        self.reached_limit = False

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns = []

    def set_system(self, text: str | None) -> None:
        """Set the system message, from the next answer on."""
        self._system = [] if text is None else [{"role": "system", "content": text}]

    def take_back(self) -> str | None:
        """Remove the latest message and its answer; return the message, or None."""
        if not self.turns:
            return None
        said: str = self.turns[-2]["content"]
        del self.turns[-2:]
        return said

    async def answer(self, text: str) -> AsyncIterator[str]:
        """Yield the pieces of the answer to ``text``; an empty one goes on with the last answer. It
        ends at --max-tokens, and where it repeats itself unless it is gone on with; ``stopped``
        says so. After a cancellation, the pieces stay in the turns.

        Raises:
            NeverFitsError: ``text`` alone is too long for the model.
            RequestFailedError: the engine failed on this answer.
        """
        from paceline.core.sampling_params import SamplingParams
        from paceline.engine.types import GenerationRequest

        goes_on = not text
        said: list[str] = [self.turns.pop()["content"]] if goes_on else []
        if not goes_on:
            self.turns.append({"role": "user", "content": text})
        self.last, self.stopped, self.reached_limit = None, "", False
        repetition = Repetition()
        try:
            prompt, max_tokens = self._prompt("".join(said))
            request = GenerationRequest(
                request_id=f"chat-{self._num_answers}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    max_tokens=max_tokens,
                    temperature=self.temperature,
                    **self._sampling,
                    seed=self._seed + self._num_answers,
                    eos_token_ids=self._client.tokenizer.eos_token_ids,
                ),
                arrival_time=_now(),
            )
            self._num_answers += 1
            outputs = self._client.generate(request)
            async for output in outputs:
                if output.finished and output.times is not None:
                    self.last = AnswerStats(
                        output.num_output_tokens,
                        output.times.first_token - output.times.arrival,
                        output.times.last_token - output.times.first_token,
                    )
                for choice in output.choices:
                    if choice.error is not None:
                        raise RequestFailedError(choice.error)
                    if choice.text:
                        said.append(choice.text)
                        yield choice.text
                    if choice.finish_reason == "length":
                        self.stopped, self.reached_limit = (
                            f"stopped after {max_tokens} tokens",
                            True,
                        )
                    elif not goes_on and repetition.add(choice.text) and not output.finished:
                        self.stopped = "stopped: the answer repeats itself"
                if self.stopped and not output.finished:
                    if isinstance(outputs, AsyncGenerator):
                        await outputs.aclose()
                    break
        finally:
            if said:
                self.turns.append({"role": "assistant", "content": "".join(said)})
            else:
                self.turns.pop()

    def _prompt(self, begun: str) -> tuple[list[int], int]:
        """Return the token ids to continue, behind what the answer ``begun`` with, and how many may
        follow. Drops the oldest turns when the conversation outgrows the context, and prints
        that."""
        tokenizer = self._client.tokenizer
        longest = self._client.info.max_model_len
        forgotten = 0
        while True:
            last = [{"role": "assistant", "content": begun}] if begun else []
            text = tokenizer.render_chat(
                [*self._system, *self.turns, *last],
                add_generation_prompt=not begun,
                continue_final_message=bool(begun),
                template_kwargs=self._template_kwargs or None,
            )
            prompt = tokenizer.encode(text, add_special_tokens=False)
            room = longest - len(prompt)
            # shorten answers for a long conversation, but only to a quarter of the context
            if room >= min(self._max_tokens, longest // 4):
                break
            if len(self.turns) <= 2:
                if room >= 1:
                    break
                raise NeverFitsError(
                    f"the message has {len(prompt)} tokens and the context has room for {longest}: "
                    "shorten it, or raise --max-model-len",
                    "messages",
                )
            del self.turns[:2]
            forgotten += 1
        if forgotten:
            print(f"(context full: dropped the {forgotten} oldest exchanges)", file=sys.stderr)
        return prompt, min(self._max_tokens, room)


def _now() -> float:
    import time

    return time.monotonic()
