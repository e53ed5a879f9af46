"""News of sequences in, answers of requests out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.outputs import RequestUpdate, Timeline, TokenLogprobs
from paceline.core.request import FinishReason
from paceline.core.sampling_params import SamplingParams
from paceline.engine.testing import ByteTokenizer
from paceline.engine.text.output_processor import OutputProcessor, merge_outputs
from paceline.engine.types import GenerationOutput, GenerationRequest, Resume, ResumedChoice
from paceline.errors import InvalidRequestError

EOS = ByteTokenizer.IM_END


def request(
    request_id: str = "r", *, n: int = 1, sampling: dict[str, Any] | None = None, **fields: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(**({"max_tokens": 50} | (sampling or {}))),
        arrival_time=10.0,
        n=n,
        **fields,
    )


def update(
    choice: str,
    text: str | Sequence[int] = "",
    *,
    finish: FinishReason | None = None,
    stop_reason: int | None = None,
    logprobs: bool = False,
    cached: int = 0,
    preemptions: int = 0,
    scheduled: float = 11.0,
    error: str | None = None,
    timeline: Timeline | None = None,
) -> RequestUpdate:
    ids = tuple(text.encode() if isinstance(text, str) else text)
    entries = tuple(TokenLogprobs(i, -0.5, 1, ((i, -0.5),)) for i in ids) if logprobs else None
    return RequestUpdate(
        choice, ids, entries, finish, stop_reason, cached, scheduled, preemptions, error, timeline
    )


def timeline(num_chunks: int) -> Timeline:
    return Timeline((), num_chunks, 0, 0, 0, demoted=False, predicted_ttft=None)


def processor(*requests: GenerationRequest) -> OutputProcessor:
    made = OutputProcessor(ByteTokenizer())
    for one in requests:
        made.add(one)
    return made


def feed(
    made: OutputProcessor, *updates: RequestUpdate, now: float = 12.0
) -> tuple[list[GenerationOutput], list[str]]:
    """One update per batch."""
    outputs: list[GenerationOutput] = []
    aborts: list[str] = []
    for number, one in enumerate(updates):
        processed = made.process([one], now + number)
        outputs += processed.outputs
        aborts += processed.stopped
        assert not processed.failed
    return outputs, aborts


class TestOneChoice:
    def test_text_ids_usage_and_times(self) -> None:
        made = processor(request())
        outputs, aborts = feed(
            made,
            update("r/0", "He", cached=2),
            update("r/0", "y", cached=2, finish=FinishReason.LENGTH, preemptions=3),
        )
        assert [out.choices[0].text for out in outputs] == ["He", "y"]
        assert [out.choices[0].token_ids for out in outputs] == [(72, 101), (121,)]
        assert [out.finished for out in outputs] == [False, True]
        last = outputs[-1]
        assert last.choices[0].finish_reason == "length"
        assert last.choices[0].stop_reason is None
        assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens) == (3, 2, 3)
        assert last.num_preemptions == 3
        assert last.times is not None
        assert last.times.arrival == 10.0
        assert last.times.first_scheduled == 11.0
        assert (last.times.first_token, last.times.last_token) == (12.0, 13.0)
        assert aborts == []
        assert made.num_unfinished == 0

    def test_eos_is_an_id_without_text(self) -> None:
        made = processor(request(skip_special_tokens=False))
        outputs, _ = feed(made, update("r/0", "a"), update("r/0", [EOS], finish=FinishReason.STOP))
        assert outputs[-1].choices[0].text == ""
        assert outputs[-1].choices[0].token_ids == (EOS,)
        assert outputs[-1].choices[0].finish_reason == "stop"
        assert outputs[-1].choices[0].stop_reason is None
        assert outputs[-1].num_output_tokens == 2

    @pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab!")])
    def test_a_stop_token_names_itself(self, include: bool, text: str) -> None:
        made = processor(request(include_stop_str_in_output=include))
        outputs, _ = feed(
            made, update("r/0", "ab!", finish=FinishReason.STOP, stop_reason=ord("!"))
        )
        assert outputs[0].choices[0].text == text
        assert outputs[0].choices[0].token_ids == tuple(b"ab!")
        assert outputs[0].choices[0].stop_reason == ord("!")

    def test_abort_hands_in_what_was_held_back(self) -> None:
        made = processor(request(stop=("END",)))
        outputs, aborts = feed(made, update("r/0", "xEN"), update("r/0", finish=FinishReason.ABORT))
        assert [out.choices[0].text for out in outputs] == ["x", "EN"]
        assert outputs[-1].choices[0].finish_reason == "abort"
        assert aborts == []

    def test_aborted_before_the_first_token(self) -> None:
        outputs, _ = feed(
            processor(request()), update("r/0", finish=FinishReason.ABORT, scheduled=0.0)
        )
        assert outputs[0].finished
        assert outputs[0].times is None

    def test_an_engine_error_is_told(self) -> None:
        outputs, _ = feed(
            processor(request()), update("r/0", finish=FinishReason.ERROR, error="NaN logits")
        )
        assert outputs[0].choices[0].finish_reason == "error"
        assert outputs[0].choices[0].error == "NaN logits"

    def test_open_bytes_end_as_a_replacement_character(self) -> None:
        made = processor(request())
        outputs, _ = feed(
            made, update("r/0", [0xE4]), update("r/0", [0xBD], finish=FinishReason.LENGTH)
        )
        assert [out.choices[0].text for out in outputs] == ["", "\N{REPLACEMENT CHARACTER}"]

    def test_without_detokenize_there_is_no_text(self) -> None:
        outputs, _ = feed(
            processor(request(detokenize=False)), update("r/0", "abc", finish=FinishReason.LENGTH)
        )
        assert outputs[0].choices[0].text == ""
        assert outputs[0].choices[0].token_ids == tuple(b"abc")

    def test_logprobs_follow_the_ids(self) -> None:
        made = processor(request(stop=("b",)))
        outputs, _ = feed(made, update("r/0", "abc", logprobs=True))
        logprobs = outputs[0].choices[0].logprobs
        assert logprobs is not None
        assert [entry.token_id for entry in logprobs] == list(b"ab")


class TestStopStrings:
    def test_ends_the_choice_and_stops_the_engine(self) -> None:
        made = processor(request(stop=("\n\n", "Q:")))
        outputs, aborts = feed(
            made, update("r/0", "A"), update("r/0", "\nQ"), update("r/0", ":"), update("r/0", "x")
        )
        assert [out.choices[0].text for out in outputs] == ["A", "\n", ""]
        assert outputs[-1].choices[0].finish_reason == "stop"
        assert outputs[-1].choices[0].stop_reason == "Q:"
        assert outputs[-1].finished
        assert outputs[-1].num_output_tokens == 4
        assert aborts == ["r/0"]

    def test_the_story_is_what_was_told_last_and_comes_with_the_end(self) -> None:
        made = processor(request(stop=("Q:",)))
        outputs, _ = feed(
            made,
            update("r/0", "A", timeline=timeline(1)),
            update("r/0", "B", timeline=timeline(2)),
            update("r/0", "Q"),
            update("r/0", ":"),
        )
        assert [out.choices[0].timeline for out in outputs] == [None, None, None, timeline(2)]

    def test_included_on_demand(self) -> None:
        outputs, _ = feed(
            processor(request(stop=("stop",), include_stop_str_in_output=True)),
            update("r/0", "do st"),
            update("r/0", "op now"),
        )
        assert [out.choices[0].text for out in outputs] == ["do ", "stop"]

    def test_ids_up_to_the_one_that_completes_it_are_kept(self) -> None:
        outputs, _ = feed(processor(request(stop=("bc",))), update("r/0", "abcde"))
        assert outputs[0].choices[0].text == "a"
        assert outputs[0].choices[0].token_ids == tuple(b"abc")
        assert outputs[0].num_output_tokens == 3

    def test_only_tokens_after_min_tokens_complete_one(self) -> None:
        made = processor(request(stop=("ab",), sampling={"min_tokens": 3}))
        outputs, aborts = feed(
            made, *(update("r/0", char) for char in "ab"), update("r/0", "a"), update("r/0", "b")
        )
        assert "".join(out.choices[0].text for out in outputs) == "ab"
        assert outputs[-1].choices[0].stop_reason == "ab"
        assert aborts == ["r/0"]

    def test_found_in_the_last_text_while_the_engine_ends_anyway(self) -> None:
        made = processor(request(stop=("b",)))
        outputs, aborts = feed(made, update("r/0", "ab", finish=FinishReason.LENGTH))
        assert outputs[0].choices[0].finish_reason == "stop"
        assert outputs[0].choices[0].stop_reason == "b"
        assert aborts == []

    @pytest.mark.parametrize("skip", [True, False])
    @pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_start|>us", "\n<|im_start|>", "<|im_"])
    def test_special_tokens_are_part_of_one(self, stop: str, skip: bool) -> None:
        special = [ByteTokenizer.IM_START]
        made = processor(request(stop=(stop,), skip_special_tokens=skip))
        outputs, aborts = feed(
            made,
            update("r/0", "a"),
            update("r/0", [ByteTokenizer.BOS, 10]),
            update("r/0", special),
            update("r/0", "use"),
        )
        text = "".join(out.choices[0].text for out in outputs)
        if skip and stop == "<|im_":
            # half of a token that is left out
            assert text == "a\nuse" and not aborts
            return
        assert outputs[-1].choices[0].stop_reason == stop and aborts == ["r/0"]
        said = "a\n" if skip else "a<|bos|>\n"
        assert text == said.removesuffix(stop.split("<")[0])

    def test_special_tokens_in_one_after_a_resume(self) -> None:
        resumed = Resume(choices=(ResumedChoice(token_ids=(97, ByteTokenizer.IM_START)),))
        made = processor(request(stop=("<|im_start|>us",), resume=resumed))
        outputs, _ = feed(made, update("r/0", "us"))
        assert outputs[-1].choices[0].stop_reason == "<|im_start|>us"

    def test_half_of_a_surrogate_pair_in_one_is_never_found(self) -> None:
        made = processor(request(stop=("\ud800", "<|im_start|>")))
        outputs, _ = feed(made, update("r/0", "ab", finish=FinishReason.LENGTH))
        assert outputs[-1].choices[0].text == "ab"

    def test_a_stop_token_flushes_what_was_held_back(self) -> None:
        made = processor(request(stop=("END",)))
        outputs, _ = feed(
            made, update("r/0", "aEN"), update("r/0", [EOS], finish=FinishReason.STOP)
        )
        assert [out.choices[0].text for out in outputs] == ["a", "EN"]
        assert outputs[-1].choices[0].stop_reason is None


class TestManyChoices:
    def test_one_output_per_batch(self) -> None:
        made = processor(request(n=3), request("s"))
        processed = made.process(
            [update("r/0", "a", cached=2), update("s/0", "z"), update("r/2", "c", cached=99)], 12.0
        )
        first, second = processed.outputs
        assert [(c.index, c.text) for c in first.choices] == [(0, "a"), (2, "c")]
        assert second.request_id == "s"
        assert first.num_output_tokens == 2
        assert first.num_cached_tokens == 2

    def test_finished_with_the_last_choice(self) -> None:
        made = processor(request(n=2))
        outputs, _ = feed(
            made,
            update("r/1", "x", finish=FinishReason.LENGTH),
            update("r/0", "y"),
            update("r/0", finish=FinishReason.ABORT),
        )
        assert [out.finished for out in outputs] == [False, False, True]
        assert outputs[-1].num_output_tokens == 2

    def test_news_of_one_choice_in_one_batch_are_joined(self) -> None:
        made = processor(request())
        processed = made.process(
            [update("r/0", "a"), update("r/0", "b", finish=FinishReason.LENGTH)], 12.0
        )
        (output,) = processed.outputs
        (choice,) = output.choices
        assert (choice.text, choice.token_ids, choice.finish_reason) == ("ab", (97, 98), "length")

    def test_discard_forgets_and_names_what_still_runs(self) -> None:
        made = processor(request(n=2))
        feed(made, update("r/0", "x", finish=FinishReason.LENGTH))
        assert made.unfinished_choices("r") == ("r/1",)
        assert made.discard("r") == ("r/1",)
        assert made.discard("r") == ()
        assert made.process([update("r/1", "late")], 12.0).outputs == ()
        assert made.num_unfinished == 0
        made.add(request())


class TestFaults:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"n": 0}, "n"),
            ({"stop": ("a", "")}, "stop"),
            ({"stop": ("a",), "detokenize": False}, "stop"),
        ],
    )
    def test_bad_requests_are_refused_and_leave_nothing(
        self, fields: dict[str, Any], param: str
    ) -> None:
        made = processor()
        with pytest.raises(InvalidRequestError) as caught:
            made.add(request(**fields))
        assert caught.value.param == param
        assert made.num_unfinished == 0

    def test_an_id_in_use_is_refused(self) -> None:
        made = processor(request())
        with pytest.raises(InvalidRequestError, match="'r' is in use"):
            made.add(request())

    def test_a_tokenizer_fault_ends_one_request(self) -> None:
        class Broken(ByteTokenizer):
            def token_bytes(self, token_id: int) -> bytes:
                if token_id == 99:
                    raise KeyError(token_id)
                return super().token_bytes(token_id)

        made = OutputProcessor(Broken())
        made.add(request("bad"))
        made.add(request("good"))
        told = update("bad/0", [99], timeline=timeline(1))
        processed = made.process([told, update("good/0", "ok")], 12.0)
        bad, good = processed.outputs
        assert bad.choices[0].finish_reason == "error"
        assert "KeyError: 99" in str(bad.choices[0].error)
        assert bad.choices[0].timeline == timeline(1)
        assert (processed.stopped, processed.failed) == ((), ("bad/0",))
        assert good.choices[0].text == "ok"


def test_merged_outputs_say_what_the_parts_said() -> None:
    made = processor(request(n=2))
    outputs, _ = feed(
        made,
        update("r/1", "x", logprobs=True),
        update("r/0", "a", logprobs=True),
        update("r/1", "y", logprobs=True, finish=FinishReason.LENGTH),
        update("r/0", "b", logprobs=True, finish=FinishReason.LENGTH),
    )
    merged = merge_outputs(outputs)
    assert [(c.index, c.text, c.finish_reason) for c in merged.choices] == [
        (0, "ab", "length"),
        (1, "xy", "length"),
    ]
    assert [len(c.logprobs or ()) for c in merged.choices] == [2, 2]
    assert merged.finished
    assert merged.num_output_tokens == 4
