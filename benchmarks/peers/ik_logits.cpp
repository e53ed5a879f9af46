// Logits of ik_llama.cpp for given tokens: MODEL THREADS WINDOWS LENGTH TOKENS OUT, where TOKENS is a
// file of int32 [windows, length] and OUT becomes one of float32 [windows * length, vocab]. Weights are
// repacked as they are loaded, as its benchmark and server are asked to.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

namespace {

void quiet(ggml_log_level, const char*, void*) {}

int failed(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    return 1;
}

}  // namespace

int main(int count, char** given) {
    if (count != 7) return failed("MODEL THREADS WINDOWS LENGTH TOKENS OUT are needed");
    const int threads = std::atoi(given[2]), windows = std::atoi(given[3]);
    const int length = std::atoi(given[4]);
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    llama_model_params of_model = llama_model_default_params();
    of_model.repack_tensors = true;
    llama_model* model = llama_model_load_from_file(given[1], of_model);
    if (!model) return failed("the model is not loaded");
    llama_context_params of_context = llama_context_default_params();
    of_context.n_ctx = of_context.n_batch = (length + 255) / 256 * 256;
    of_context.n_threads = of_context.n_threads_batch = threads;
    of_context.flash_attn = true;
    llama_context* context = llama_init_from_model(model, of_context);
    if (!context) return failed("there is no context");
    const size_t vocabulary = llama_n_vocab(model);
    std::vector<int32_t> tokens(static_cast<size_t>(windows) * length);
    std::FILE* text = std::fopen(given[5], "rb");
    if (!text || std::fread(tokens.data(), 4, tokens.size(), text) != tokens.size())
        return failed("the tokens are not read");
    std::fclose(text);
    std::FILE* out = std::fopen(given[6], "wb");
    if (!out) return failed("the logits cannot be written");
    llama_batch batch = llama_batch_init(length, 0, 1);
    for (int window = 0; window < windows; window++) {
        llama_kv_cache_clear(context);
        batch.n_tokens = length;
        for (int i = 0; i < length; i++) {
            batch.token[i] = tokens[static_cast<size_t>(window) * length + i];
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(context, batch)) return failed("a window is not decoded");
        const size_t numbers = static_cast<size_t>(length) * vocabulary;
        if (std::fwrite(llama_get_logits(context), 4, numbers, out) != numbers)
            return failed("the logits cannot be written");
    }
    return std::fclose(out) ? failed("the logits cannot be written") : 0;
}
