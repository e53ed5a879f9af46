"""Logits of llama.cpp for given tokens, written to a file by a process with its binding.

Its arguments are the binding's source, a model, threads, and two ``.npy`` files: token ids
[windows, length] are read from one, and logits [windows * length, vocab] in float32 are written to
the other. Every window is read at once, as a prompt is.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["main"]


def main() -> int:
    source, model, threads, windows_path, logits_path = sys.argv[1:]
    sys.path.insert(0, source)
    api: Any = importlib.import_module("llama_cpp.llama_cpp")
    numpy: Any = importlib.import_module("numpy")
    windows = numpy.load(windows_path)
    count, length = windows.shape
    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    if not loaded:
        raise RuntimeError(f"llama.cpp does not load {model}")
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))
    parameters = api.llama_context_default_params()
    parameters.n_ctx = -(-length // 256) * 256
    parameters.n_batch = parameters.n_ctx
    parameters.n_threads = parameters.n_threads_batch = int(threads)
    context = api.llama_init_from_model(loaded, parameters)
    if not context:
        raise RuntimeError(f"no context of {length} tokens")
    batch = api.llama_batch_init(length, 0, 1)
    logits = numpy.lib.format.open_memmap(
        logits_path, mode="w+", dtype=numpy.float32, shape=(count * length, vocab)
    )
    for index, window in enumerate(windows.tolist()):
        api.llama_memory_clear(api.llama_get_memory(context), True)
        batch.n_tokens = length
        for place, token in enumerate(window):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, True
        if status := api.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode answered {status}")
        found = numpy.ctypeslib.as_array(api.llama_get_logits(context), (length, vocab))
        logits[index * length : (index + 1) * length] = found
    logits.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
