"""``POST /v1/embeddings``: checked like any other request, and then refused with the reason.

Models are run as decoders here: backends answer with tokens, never with hidden states. Few of them
were trained to be compared by their hidden states anyway; of the others, a vector would look like
an embedding and rank like noise.
"""

from __future__ import annotations

from typing import Any, NoReturn

from paceline.core.errors import InvalidRequestError
from paceline.http.fields import Fields
from paceline.server.bodies.protocol import check_model
from paceline.server.bodies.rules import RequestRules

__all__ = ["refuse_embeddings"]


def refuse_embeddings(body: dict[str, Any], rules: RequestRules) -> NoReturn:
    """Raises InvalidRequestError, or UnknownModelError for a model that is not here at all."""
    fields = Fields(body)
    check_model(fields, rules)
    if fields.raw("input") is None:
        raise InvalidRequestError("input is missing", "input")
    for name in ("encoding_format", "dimensions", "user"):
        fields.raw(name)
    raise InvalidRequestError(
        f"The model {rules.served_model_names[0]} does not support embeddings: it is a decoder "
        "that predicts tokens, without a head for pooling. Serve an embedding model elsewhere.",
        "model",
    )
