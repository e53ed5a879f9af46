"""Between text and token ids: tokenizers, chat templates, detokenisation, grammars.

Chat templates are programs that callers may write, so they run in a sandbox (``template_sandbox``)
and, unless they are known to end, in a process of their own (``template_process``).
"""
