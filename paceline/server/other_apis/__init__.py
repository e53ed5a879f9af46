"""APIs in addition to OpenAI's first two: Responses, Anthropic's Messages, llama-server's,
Ollama's, and token ids in and out.

Responses and Messages turn their body into a chat body and build their answer from chat pieces, so
that the code of ``/v1/chat/completions`` checks, renders and runs every field.
"""
