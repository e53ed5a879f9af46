"""The gateway beside direct access and LiteLLM's proxy; see ``__main__``."""
