"""Model files on disk: finding them, checking them, reading their config, tokenizer and tensors.

Imports no torch, so a server can read a tokenizer without loading it. Nothing here runs code from
a checkpoint: no pickle, no ``auto_map``, no unsandboxed template.
"""
