"""Hugging Face folders: config.json, and the checkpoints made of it and the weights."""
