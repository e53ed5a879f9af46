"""OpenAI's endpoints: chat and completions, from the parsed request to the bytes of the answer."""
