"""What clients of every kind ask, and the tools and schemas they bring."""

from __future__ import annotations

QUESTION = "Name the capital of France."
# a base to go on from: to the question alone the model says nothing
COUNTING = "One, two, three,"
MESSAGES = [{"role": "user", "content": QUESTION}]

WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": WEATHER_PARAMETERS,
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time of day.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}]

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "kind": {"type": "string", "enum": ["capital", "town"]},
    },
    "required": ["city", "population", "kind"],
    "additionalProperties": False,
}
