"""Fields that exist elsewhere and are not served here: refused out loud, never dropped.

A caller who asks for JSON and gets prose would blame the model. A field moves out of these tables
when it is served.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection
from typing import Any, Final

from paceline.core.errors import InvalidRequestError
from paceline.http.fields import Fields, show

__all__ = [
    "NO_EFFECT",
    "NO_EFFECT_IN_COMPLETIONS",
    "REFUSED_IN_CHAT",
    "REFUSED_IN_COMPLETIONS",
    "RefusedFields",
    "note_unknown",
    "refuse_unserved",
]

_log = logging.getLogger("paceline.server")

# field -> (whether a value asks for it, what it would be)
RefusedFields = dict[str, tuple[Callable[[Any], bool], str]]


def _given(value: Any) -> bool:
    return value not in (None, False, [], {}, "")


_BEAMS: Final = (
    "beam search, which knows no token of its answer before the last, so that nothing could be "
    "streamed or paced; ask for n choices with logprobs and take the likeliest"
)
_EVERYWHERE: Final[RefusedFields] = {
    "guided_json": (_given, "guided decoding by its older names; structured_outputs does it"),
    "guided_regex": (_given, "guided decoding by its older names; structured_outputs does it"),
    "guided_choice": (_given, "guided decoding by its older names; structured_outputs does it"),
    "guided_grammar": (_given, "guided decoding by its older names; structured_outputs does it"),
    "guided_decoding_backend": (
        _given,
        "guided decoding by its older names; structured_outputs does it",
    ),
    "use_beam_search": (_given, _BEAMS),
    "length_penalty": (lambda v: v is not None and v != 1, _BEAMS),
    "prompt_embeds": (_given, "a prompt of embeddings"),
    "thinking_token_budget": (lambda v: v is not None, "a budget for thinking"),
    "spaces_between_special_tokens": (lambda v: v is False, "joining special tokens"),
    "kv_transfer_params": (_given, "KV transfer"),
    "ec_transfer_params": (_given, "encoder transfer"),
    "vllm_xargs": (_given, "engine-specific arguments"),
    "repetition_detection": (_given, "repetition detection"),
    "stream_interval": (lambda v: v not in (None, 1), "several tokens per event"),
    "return_prompt_text": (_given, "returning the prompt's text"),
    "return_token_offsets": (_given, "token offsets"),
    "routed_experts_prompt_start": (lambda v: v is not None, "telling routed experts"),
    "moderation": (_given, "moderation"),
    # of llama.cpp's server and SGLang
    "mirostat": (lambda v: v not in (None, 0), "Mirostat sampling"),
    "dry_multiplier": (lambda v: v not in (None, 0), "DRY sampling"),
    "xtc_probability": (lambda v: v not in (None, 0), "XTC sampling"),
    "dynatemp_range": (lambda v: v not in (None, 0), "a temperature that moves"),
    "typical_p": (lambda v: v not in (None, 1), "locally typical sampling"),
    "tfs_z": (lambda v: v not in (None, 1), "tail-free sampling"),
    "top_n_sigma": (lambda v: v is not None and v != -1, "top-n-sigma sampling"),
    "samplers": (_given, "samplers in another order"),
    "n_probs": (lambda v: v not in (None, 0), "n_probs; logprobs does it"),
}
REFUSED_IN_CHAT: Final[RefusedFields] = {
    **_EVERYWHERE,
    "functions": (_given, "calling by its older name; tools does it"),
    "function_call": (
        lambda v: v not in (None, "none"),
        "calling by its older name; tool_choice does it",
    ),
    "documents": (_given, "documents"),
    "mm_processor_kwargs": (_given, "multimodal input"),
    "media_io_kwargs": (_given, "multimodal input"),
    "audio": (_given, "audio output"),
    "modalities": (lambda v: v not in (None, ["text"]), "output other than text"),
    "web_search_options": (lambda v: v is not None, "web search"),
}
REFUSED_IN_COMPLETIONS: Final[RefusedFields] = {
    **_EVERYWHERE,
    "suffix": (_given, "inserting before a suffix"),
    "best_of": (lambda v: v not in (None, 1), "best_of above 1"),
}
# accepted for compatibility; they describe the caller, not the answer
NO_EFFECT: Final = (
    "metadata",
    "store",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "session_id",
    "verbosity",
)


# thoughts are told apart, and what is expected is read, in chat alone
NO_EFFECT_IN_COMPLETIONS: Final = (*NO_EFFECT, "include_reasoning", "prediction")


def refuse_unserved(
    fields: Fields, refused: RefusedFields, no_effect: Collection[str] = NO_EFFECT
) -> None:
    """Raises InvalidRequestError if the request asks for one of ``refused``."""
    for name, (asks, what) in refused.items():
        value = fields.raw(name)
        if value is not None and asks(value):
            raise InvalidRequestError(
                f"{name}={show(value)} is not served yet: this server does not do {what}", name
            )
    for name in no_effect:
        fields.raw(name)


def note_unknown(fields: Fields, *, strict: bool = False) -> tuple[str, ...]:
    """The names nobody read, shortened and 16 at most, which are logged at debug level: a misspelt
    field looks like this.

    Raises:
        InvalidRequestError: there are some, and the server is ``strict``.
    """
    unknown = fields.unknown()
    if unknown:
        _log.debug("unknown_fields names=%s", ",".join(unknown))
    if unknown and strict:
        told = [f"{name}{_meant(name, fields.asked)}" for name in unknown]
        raise InvalidRequestError(
            f"unknown fields: {', '.join(told)}; this server was started with --strict-fields",
            unknown[0].strip("'"),
        )
    return tuple(unknown)


def _meant(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name.strip("'"), known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
