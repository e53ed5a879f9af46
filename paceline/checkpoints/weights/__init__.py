"""Tensors as Hugging Face folders store them: safetensors, and weights in 8 or 4 bits."""
