"""GGUF files: container, tensors, config, tokenizer, and the checkpoint made of them."""
