"""``POST /v1/embeddings``: checked like any other request, and then refused with the reason.

Models are run as decoders here: backends answer with tokens, never with hidden states. Few of them
were trained to be compared by their hidden states anyway; of the others, a vector would look like
an embedding and rank like noise.
"""

from __future__ import annotations

from typing import Any, NoReturn

from paceline.core.errors import InvalidRequestError
from paceline.server.bodies.body import Body
from paceline.server.bodies.kinds import MODEL, anything, needed
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.schemas import INTEGER, STRING, array

__all__ = ["EmbeddingsBody", "refuse_embeddings"]


class EmbeddingsBody(Body, lenient=True):
    """``/v1/embeddings``."""

    model = MODEL
    input = needed(anything({"anyOf": [STRING, array(STRING), array(INTEGER)]}))
    encoding_format = anything(STRING)
    dimensions = anything(INTEGER)
    user = anything(STRING)


def refuse_embeddings(body: dict[str, Any], rules: RequestRules) -> NoReturn:
    """Raises InvalidRequestError, or UnknownModelError for a model that is not here at all."""
    EmbeddingsBody.read(body, rules)
    raise InvalidRequestError(
        f"The model {rules.served_model_names[0]} does not support embeddings: it is a decoder "
        "that predicts tokens, without a head for pooling. Serve an embedding model elsewhere.",
        "model",
    )
