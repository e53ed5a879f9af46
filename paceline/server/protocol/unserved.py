"""Fields of chat and completions that other servers have and this one lacks: refused with an error,
never dropped.

A caller who gets prose instead of JSON would blame the model. A field that gets served moves out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from paceline.server.protocol.body import Body, Field
from paceline.server.protocol.field_types import NOTHING, ignored, refused

__all__ = ["UnservedFields", "undone"]


def undone(
    what: str, *harmless: Any, asks: Callable[[Any], bool] | None = None, note: str | None = None
) -> Field[None]:
    """A field that needs ``what``, unless its value is harmless (by default: requests nothing) or
    ``asks`` says that it does not need it."""
    says = f"={{value}} is not served yet: this server does not do {what}"
    return refused(says, harmless or NOTHING, asks=asks, note=what if note is None else note)


_BEAMS: Final = (
    "beam search, which knows no token of its answer before the last, so that nothing could be "
    "streamed or paced; ask for n choices with logprobs and take the likeliest"
)
_GUIDED: Final = "guided decoding by its older names; structured_outputs does it"


class UnservedFields(Body):
    """Unserved fields of both chat and completions."""

    guided_json = guided_regex = guided_choice = guided_grammar = undone(_GUIDED)
    guided_decoding_backend = undone(_GUIDED)
    use_beam_search = undone(_BEAMS)
    length_penalty = undone(_BEAMS, 1)
    prompt_embeds = undone("a prompt of embeddings")
    thinking_token_budget = undone("a budget for thinking", asks=lambda _: True)
    spaces_between_special_tokens = undone("joining special tokens", asks=lambda v: v is False)
    kv_transfer_params = undone("KV transfer")
    ec_transfer_params = undone("encoder transfer")
    vllm_xargs = undone("engine-specific arguments")
    repetition_detection = undone("repetition detection")
    stream_interval = undone("several tokens per event", 1)
    return_prompt_text = undone("returning the prompt's text")
    return_token_offsets = undone("token offsets")
    routed_experts_prompt_start = undone("telling routed experts", asks=lambda _: True)
    moderation = undone("moderation")
    # fields of llama.cpp's server and SGLang
    mirostat = undone("Mirostat sampling", 0)
    dry_multiplier = undone("DRY sampling", 0)
    xtc_probability = undone("XTC sampling", 0)
    dynatemp_range = undone("a temperature that moves", 0)
    typical_p = undone("locally typical sampling", 1)
    tfs_z = undone("tail-free sampling", 1)
    top_n_sigma = undone("top-n-sigma sampling", -1)
    samplers = undone("samplers in another order")
    n_probs = undone("n_probs; logprobs does it", 0)
    # these describe the caller, not the answer
    metadata = ignored()
    prompt_cache_key = ignored()
    prompt_cache_options = ignored()
    prompt_cache_retention = ignored()
    session_id = ignored()
    verbosity = ignored()
