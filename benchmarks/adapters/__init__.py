"""Rows and requests with LoRA adapters: what they cost, and what others feel of them."""
