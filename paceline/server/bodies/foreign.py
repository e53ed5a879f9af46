"""Fields that llama.cpp's server and SGLang have under names of their own, as ours.

What means the same is translated before a body is parsed. What would change the answer and has no
counterpart is in ``unserved``, and refused.
"""

from __future__ import annotations

from typing import Any, Final

from paceline.core.errors import InvalidRequestError
from paceline.http.fields import show

__all__ = ["IN_STRUCTURED_OUTPUTS", "SAME_MEANING", "translated"]

# theirs -> ours
SAME_MEANING: Final = {
    # llama.cpp
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    # SGLang
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# theirs -> the key of ``structured_outputs``: llama.cpp's two, SGLang's three
IN_STRUCTURED_OUTPUTS: Final = {
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
# as many as there is place for, as llama.cpp writes it
_UNLIMITED: Final = ("n_predict", -1)


def translated(body: dict[str, Any]) -> dict[str, Any]:
    """The body in our words; itself where there is nothing to translate.

    Raises:
        InvalidRequestError: a field is given under two names.
    """
    found = [name for name in _THEIRS if body.get(name) not in (None, "")]
    if not found:
        return body
    made = {name: value for name, value in body.items() if name not in _THEIRS}
    for name in found:
        value = body[name]
        if (name, value) == _UNLIMITED:
            continue
        ours = SAME_MEANING.get(name, "structured_outputs")
        if made.get(ours) is not None:
            raise InvalidRequestError(
                f"{name}={show(value)} and {ours}={show(made[ours])} mean the same here: give one "
                "of them",
                name,
            )
        kind = IN_STRUCTURED_OUTPUTS.get(name)
        made[ours] = value if kind is None else {kind: value}
    return made


_THEIRS: Final = frozenset(SAME_MEANING) | frozenset(IN_STRUCTURED_OUTPUTS)
