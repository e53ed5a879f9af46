"""The gateway compared with direct access and LiteLLM's proxy; see ``__main__``."""
