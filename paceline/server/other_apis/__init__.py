"""APIs beside OpenAI's first two: Responses, Anthropic's Messages, and token ids in and out.

Responses and Messages turn their body into a chat body and their answer from chat pieces, so every
field is checked, rendered and run by the same code as ``/v1/chat/completions``.
"""
