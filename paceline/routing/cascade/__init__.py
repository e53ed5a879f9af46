"""Cascade: whether a small model's answer is good enough, or a large model is asked.

::

    prompt  --> prompts      hashed n-grams and form      \
    answer  --> answers      exact faults                  > scorer --> score >= threshold: small
                answer_form  form next to the prompt      /  forest
                confidence   log-probabilities           /
    labels  --> conformal    threshold whose expected loss is at most ``max_loss``
    waits   --> easing       threshold between two bounds while the large engines are busy
    turns   --> conversations   a conversation goes up freely, and never down
    scores  --> drift        whether requests are still like the labels
    both models' answers --> audit   whether the bound still holds

A score is the predicted probability that the small answer loses nothing. Values in, decisions out:
no clock and no socket.
"""

from paceline.routing.cascade.answer_form import ANSWER_FORM, form_of_answer
from paceline.routing.cascade.answers import (
    Answer,
    agree,
    exact_fault,
    is_loop,
    is_refusal,
    plain_text,
)
from paceline.routing.cascade.audit import Audit
from paceline.routing.cascade.confidence import CONFIDENCE, Token, confidence_of
from paceline.routing.cascade.conformal import TooFewLabelsError, labels_missing, pick_threshold
from paceline.routing.cascade.conversations import Conversations
from paceline.routing.cascade.drift import Drift
from paceline.routing.cascade.easing import Easing
from paceline.routing.cascade.forest import Forest, fit_forest, has_forests
from paceline.routing.cascade.json_schema import violation
from paceline.routing.cascade.prompts import FORM, NUM_BUCKETS, form_of, ngrams_of
from paceline.routing.cascade.scorer import Features, Scorer, fit_scorer

__all__ = [
    "ANSWER_FORM",
    "CONFIDENCE",
    "FORM",
    "NUM_BUCKETS",
    "Answer",
    "Audit",
    "Conversations",
    "Drift",
    "Easing",
    "Features",
    "Forest",
    "Scorer",
    "Token",
    "TooFewLabelsError",
    "agree",
    "confidence_of",
    "exact_fault",
    "fit_forest",
    "fit_scorer",
    "form_of",
    "form_of_answer",
    "has_forests",
    "is_loop",
    "is_refusal",
    "labels_missing",
    "ngrams_of",
    "pick_threshold",
    "plain_text",
    "violation",
]
