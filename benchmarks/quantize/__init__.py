"""The loss of ``paceline quantize``, measured on a twin of the default model."""
