/* The C interface of the native compute path. Functions that return int give 0, or -1 with a message
 * in paceline_error(); a model is used from one thread at a time. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* changes whenever a struct or a signature below does */
#define PACELINE_ABI 22

typedef enum {
  PL_EMBEDDING = 0, PL_FINAL_NORM, PL_HEAD,
  PL_ATTENTION_NORM, PL_MLP_NORM, PL_Q_NORM, PL_K_NORM,
  PL_Q, PL_K, PL_V, PL_O, PL_GATE, PL_UP, PL_DOWN,
  PL_Q_BIAS, PL_K_BIAS, PL_V_BIAS, PL_O_BIAS, PL_GATE_BIAS, PL_UP_BIAS, PL_DOWN_BIAS,
  PL_ATTENTION_OUT_NORM, PL_MLP_OUT_NORM,
  PL_ROUTER, PL_ROUTER_BIAS, PL_SINKS,
  PL_TENSORS
} PacelineTensor;

/* matrices of a layer whose kind PacelineConfig.kinds says; gate and up are one, and those of all experts alike */
typedef enum {
  PL_KIND_Q = 0, PL_KIND_K, PL_KIND_V, PL_KIND_O, PL_KIND_GATE_UP, PL_KIND_DOWN,
  PL_KINDS
} PacelineKind;

typedef struct {
  int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocab, max_positions;
  int64_t num_blocks, block_size;
  /* blocks of layers with a sliding window alone, behind the others; 0: these layers use the others' too */
  int64_t num_window_blocks;
  int64_t sliding_window; /* 0: none */
  int64_t experts;        /* of a layer's MLP, which of them a row goes to, and their width; 0: one MLP for all rows */
  int64_t experts_per_token, expert_inner;
  int32_t tied, qk_norm, qkv_bias, o_bias, mlp_bias;
  int32_t weights; /* 0 float32, 1 bfloat16, 2 int8, 3 4-bit */
  int32_t headless; /* nonzero: hidden states alone are wanted, and no head is loaded */
  int32_t kv;      /* 0 float32, 1 bfloat16, 2 int8 */
  int32_t threads;
  int32_t norms;         /* bits: 1 before attention and MLP, 2 on what they give */
  int32_t qk_norm_whole; /* nonzero: over all heads together */
  int32_t activation;    /* the gate's function: 0 SiLU, 1 GELU by tanh, 2 clamped SwiGLU (kernels.h) */
  int32_t normalise_experts; /* nonzero: shares of the experts that a row goes to sum up to 1, else those of all */
  int32_t router_bias, sinks;
  float eps;
  float sum_eps;         /* of norms of the sum of all layers */
  float embedding_scale;
  float attention_scale; /* 0: 1 / sqrt(head_dim) */
  float swiglu_limit;    /* of the clamped SwiGLU */
  float attention_softcap, logits_softcap; /* callers see to 1e-6 to 1e6: x becomes cap * tanh(x / cap); 0: it stays */
  const uint8_t* ropes;   /* [layers] 0 not rotated, else 1 and the number of the layer's tables */
  const uint8_t* sliding; /* [layers], nonzero where the window applies; may be null */
  const uint8_t* dense;   /* [layers], nonzero where a model with experts has one MLP; may be null */
  /* [layers * PL_KINDS + 2], may be null: the kind of each matrix, numbered as `weights` and further 4 Q4_0,
   * 5 Q4_K, 6 Q5_K, 7 Q6_K, 8 IQ4_NL, 9 IQ4_XS, 10 MXFP4, which hold that type's own bits; at the end those of the head, which is the embedding
   * table too where they are tied, and of the table. */
  const uint8_t* kinds;
  const char* isa;        /* null: the best that works here */
} PacelineConfig;

typedef struct PacelineAdapter PacelineAdapter;

typedef struct {
  int64_t tokens, sequences, table_width, sampled;
  const int32_t* token_ids;   /* [tokens] */
  const int32_t* positions;   /* [tokens], consecutive within a sequence */
  const int32_t* query_start; /* [sequences + 1] */
  const int32_t* tables;      /* [sequences, table_width] block ids */
  /* the same of window blocks; what a window does not reach is not read. Null where there are none */
  const int32_t* window_tables;
  const int32_t* sample_rows; /* [sampled], ascending token rows */
  float* logits;              /* [sampled, vocab], capped; null where only `likeliest` is wanted */
  int32_t* likeliest;         /* [sampled] first of the largest logits, -1 where one is not finite */
  /* [sampled, hidden] the sum of all layers of these rows, before the last norm and divided by what is added to
   * it by; null: not wanted. With it neither `logits` nor `likeliest` is written. */
  float* hidden;
  /* [sequences], null for a sequence without one, and their factors; both null where no sequence has one. Each
   * stays until the step has run. */
  const PacelineAdapter* const* adapters;
  const float* adapter_scales;
} PacelineStep;

/* One token for each row. Logits are finite, or minus infinity where a token must not be chosen. */
typedef struct {
  int64_t rows, vocab;
  const float* const* logits;  /* [rows], each of vocab floats */
  const int32_t* likeliest;    /* [rows] first of the largest, -1: not known */
  const uint8_t* const* masks; /* [rows], null or vocab bytes: 1 where a token must not be chosen, else 0 */
  const double* temperature;   /* [rows] 0: the likeliest is chosen, the others do not matter */
  const int64_t* top_k;        /* [rows] 0: any number */
  const double* top_p;         /* [rows] 1: all */
  const double* min_p;         /* [rows] 0: all */
  const double* uniform;       /* [rows] in [0, 1) */
  int32_t* tokens;             /* [rows] chosen; -1 where nothing may be */
} PacelineDraw;

/* Log-probabilities of one token of each row, and of the likeliest ones. What is said of a row that
 * is not finite means nothing. */
typedef struct {
  int64_t rows, vocab;
  int64_t count;              /* of the likeliest ones, at most vocab and 64 */
  const float* const* logits; /* [rows], each of vocab floats */
  const int32_t* tokens;      /* [rows] */
  double* own;                /* [rows] */
  int64_t* ranks;             /* [rows] 1 and how many logits are larger */
  int32_t* top_tokens;        /* [rows, count] equal logits in the order of the vocabulary */
  double* top;                /* [rows, count] */
} PacelineLogprobs;

typedef struct PacelineModel PacelineModel;
typedef struct PacelineMatrix PacelineMatrix;

int paceline_abi(void);
const char* paceline_error(void);
/* Names of the variants that run here, best first, separated by commas; until the thread's next call.
 * The environment's PACELINE_ISA leaves out those better than the one it names; null with a message in
 * paceline_error() where that one does not run here. */
const char* paceline_variants(void);

PacelineModel* paceline_create(const PacelineConfig* config);
void paceline_destroy(PacelineModel* model);
/* data: [rows, columns] as `type` (GGUF numbers: 0 f32, 1 f16, 2 q4_0, 3 q4_1, 8 q8_0, 12 q4_k,
 * 13 q5_k, 14 q6_k, 20 iq4_nl, 23 iq4_xs, 30 bf16, 39 mxfp4); expert: whose, of a layer with experts, else 0 */
int paceline_load(PacelineModel* model, int tensor, int64_t layer, int64_t expert, int type, const void* data,
                  int64_t rows, int64_t columns);
/* tables 0 or 1, each [max_positions, head_dim / 2] */
int paceline_set_rope(PacelineModel* model, int table, const float* cos, const float* sin);
/* checks that all is there; from here on the other threads have the priority of the one that calls this */
int paceline_ready(PacelineModel* model);
/* Piece `index` of what loading makes of tensors: its address and bytes, null behind the last. Written as they are
 * and read back into a model of the same config, all of them stand for loading, which paceline_restored says. */
void* paceline_piece(PacelineModel* model, int64_t index, int64_t* bytes);
int paceline_restored(PacelineModel* model);
int paceline_forward(PacelineModel* model, const PacelineStep* step);
/* From now on forward calls `offer` between two layers while *wanted, which other processes may change, is not zero,
 * but not within `slice` seconds of its last return or of the step's begin; meanwhile no thread of the team computes.
 * Returns how many times a step may. Null: never. */
int64_t paceline_hand_over(PacelineModel* model, const int64_t* wanted, void (*offer)(void), double slice);
/* Low-rank additions to a model's products: y += scale * B (A x). ranks and scales: [layers, 7] of q, k, v, o, gate,
 * up and down, rank 0 where there is none; values are kept in bfloat16 (0), float32 (1) or signed bytes (2). The model may be at
 * work meanwhile, and both calls may come from another thread. a: [rank, columns], b: [rows, rank]. */
PacelineAdapter* paceline_adapter(const PacelineModel* model, const int64_t* ranks, const float* scales, int values);
int paceline_adapter_set(PacelineAdapter* adapter, int64_t layer, int matrix, const float* a, const float* b);
int64_t paceline_adapter_bytes(const PacelineAdapter* adapter);
void paceline_adapter_destroy(PacelineAdapter* adapter);
/* For whoever counts memory before there is a model, out: keys before a window's first that attention reads, masked,
 * at most, and pairs of a row and an expert that are computed at once. */
void paceline_limits(int64_t* out);
int paceline_copy_blocks(PacelineModel* model, const int64_t* from, const int64_t* to, int64_t count);
/* By the model's team and with its kernels; model may be null: on the calling thread, with the best. */
int paceline_draw(PacelineModel* model, const PacelineDraw* draw);
int paceline_logprobs(PacelineModel* model, const PacelineLogprobs* logprobs);
int64_t paceline_block_bytes(const PacelineModel* model);
int64_t paceline_weight_bytes(const PacelineModel* model);
const char* paceline_isa(const PacelineModel* model);
/* turns timing on and zeroes it; out: seconds of embed, norm, qkv, rope, attend, encode, out,
 * route, gate_up, down, head since then */
void paceline_profile(PacelineModel* model, int on);
void paceline_seconds(const PacelineModel* model, double* out);

/* Pieces on their own, for tests and benchmarks. */
/* q, k and v side by side in qkv [tokens, (heads + 2 * kv_heads) * head_dim], overwritten; rotates,
 * stores into layer 0 and attends; out: [tokens, heads * head_dim] */
int paceline_attention(PacelineModel* model, const PacelineStep* step, float* qkv, float* out);
void* paceline_cache(PacelineModel* model, int64_t* bytes);
/* What paceline_variants would name on a processor whose cpuid says leaf 1 ecx, leaf 7 ebx, leaf 7 ecx and
 * leaf 7.1 eax, under a system that saves these register states (XCR0); until the thread's next call. */
const char* paceline_variants_for(const uint32_t* cpuid, uint64_t states);
/* What differs between variants (null: the best) beyond their speed, out: whether products of bytes share 16
 * bits, and whether activations beside bfloat16 weights stay float32. */
int paceline_traits(const char* isa, int64_t* out);
/* measured cycles a second of the calling thread's processor, 0 where that is not known */
double paceline_clock_hz(void);

PacelineMatrix* paceline_matrix(int weights, int type, const void* data, int64_t rows, int64_t columns,
                                int threads, const char* isa);
void paceline_matrix_destroy(PacelineMatrix* matrix);
/* y [m, rows] = x [m, columns] times the matrix; repeat: times the product is computed */
int paceline_matrix_multiply(PacelineMatrix* matrix, const float* x, int64_t m, float* y, int repeat);
/* seconds of the products of x [m, columns] with `count` matrices of one shape and kind, one after the
 * other, by the first one's threads; below 0 on failure */
double paceline_products_seconds(PacelineMatrix* const* matrices, int64_t count, const float* x, int64_t m);
/* Multiply-adds a second that `threads` threads reach with the instructions that a variant (null: the
 * best) multiplies this kind of weights by, from registers only; 0 where that is not known, below 0 on
 * failure. */
double paceline_peak(const char* isa, int weights, int threads);
/* seconds that `threads` threads take to read bytes of data, together, the best of `repeat` times;
 * below 0 on failure */
double paceline_read_seconds(const void* data, int64_t bytes, int threads, int repeat);
int paceline_matrix_unpack(const PacelineMatrix* matrix, float* out);

#ifdef __cplusplus
}
#endif
#endif
