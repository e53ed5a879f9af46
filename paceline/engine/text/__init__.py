"""Text work around the engine: tokenizers, chat templates, detokenisation, grammars.

Chat templates are programs that callers may write, so they run in a sandbox (``template_sandbox``)
and, unless they are known to end, in a process of their own (``template_process``).
"""
