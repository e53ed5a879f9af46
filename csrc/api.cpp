// The C interface over Model and Matrix: exceptions stop here.
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "ceiling.h"
#include "features.h"
#include "model.h"
#include "paceline_native.h"

using namespace paceline;

struct PacelineModel {
  Model model;
  // as Model::pieces has them
  std::vector<Model::Piece> pieces;
  explicit PacelineModel(const PacelineConfig& config) : model(config), pieces(model.pieces()) {}
};

struct PacelineMatrix {
  const Kernels* kernels;
  Team team;
  Arena arena;
  Matrix matrix;
  Memory acts, scales;
  PacelineMatrix(const char* isa, int threads) : kernels(choose_kernels(isa)), team(threads < 1 ? 1 : threads) {}
};

namespace {

thread_local std::string error_text;

template <class F>
int guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    error_text = "out of memory";
  } catch (const std::exception& error) {
    error_text = error.what();
  }
  return -1;
}

// scratch memory of a thread that samples without a model
Sampler& caller_sampler() {
  thread_local Sampler sampler;
  return sampler;
}

std::string names_of(const std::vector<const Kernels*>& found) {
  std::string text;
  for (const Kernels* kernels : found) {
    if (!text.empty()) text += ',';
    text += kernels->name;
  }
  return text;
}

// x in the form that the matrix multiplies, in its own memory, for a product into y.
GemmArgs encoded(PacelineMatrix* m, const float* x, int64_t rows, float* y) {
  const int64_t columns = m->matrix.columns(), stride = (columns + 63) / 64 * 256;
  m->acts.reserve(size_t(rows * stride));
  m->scales.reserve(size_t(rows * (q4_scales(columns) + 2)) * 4);
  float* scales = reinterpret_cast<float*>(m->scales.data());
  const Weights kind = m->matrix.kind();
  const int64_t per_row = kind >= Weights::kQ4 ? q4_scales(columns) : (columns + kActGroup - 1) / kActGroup + 1;
  for (int64_t r = 0; r < rows; ++r)
    m->kernels->encode(x + r * columns, columns, (columns + 3) / 4 * 4, m->kernels->acts[int(kind)],
                       m->acts.data() + r * stride, scales + r * per_row);
  GemmArgs args;
  args.a = m->acts.data();
  args.a_stride = stride;
  args.a_scale = scales;
  args.w = m->matrix.view();
  args.out = y;
  args.out_stride = m->matrix.rows();
  return args;
}

// asked once: under a hypervisor, looking takes longer than a draw
const Kernels& best_kernels() {
  static const Kernels* const best = choose_kernels(nullptr);
  return *best;
}

}  // namespace

extern "C" {

int paceline_abi(void) { return PACELINE_ABI; }

const char* paceline_error(void) { return error_text.c_str(); }

const char* paceline_variants(void) {
  thread_local std::string names;
  const int failed = guarded([&] { names = names_of(usable_kernels()); });
  return failed ? nullptr : names.c_str();
}

PacelineModel* paceline_create(const PacelineConfig* config) {
  PacelineModel* model = nullptr;
  guarded([&] { model = new PacelineModel(*config); });
  return model;
}

void paceline_destroy(PacelineModel* model) { delete model; }

int paceline_load(PacelineModel* model, int tensor, int64_t layer, int64_t expert, int type, const void* data,
                  int64_t rows, int64_t columns) {
  return guarded([&] {
    model->model.load(PacelineTensor(tensor), int(layer), int(expert), Source(type), data, rows, columns);
  });
}

int paceline_set_rope(PacelineModel* model, int table, const float* cos, const float* sin) {
  return guarded([&] { model->model.set_rope(table, cos, sin); });
}

int paceline_ready(PacelineModel* model) {
  return guarded([&] { model->model.ready(); });
}

void* paceline_piece(PacelineModel* model, int64_t index, int64_t* bytes) {
  if (index < 0 || index >= int64_t(model->pieces.size())) return nullptr;
  const Model::Piece& piece = model->pieces[size_t(index)];
  *bytes = int64_t(piece.bytes);
  return piece.data;
}

int paceline_restored(PacelineModel* model) {
  return guarded([&] { model->model.restored(); });
}

int paceline_forward(PacelineModel* model, const PacelineStep* step) {
  return guarded([&] { model->model.forward(*step); });
}

int64_t paceline_hand_over(PacelineModel* model, const int64_t* wanted, void (*offer)(void), double slice) {
  return model->model.hand_over(wanted, offer, slice);
}

PacelineAdapter* paceline_adapter(const PacelineModel* model, const int64_t* ranks, const float* scales, int values) {
  Adapter* made = nullptr;
  guarded([&] {
    if (values < 0 || values > 2) throw std::invalid_argument("values of an adapter are kept as 0, 1 or 2");
    made = new Adapter(model->model.adapted_products(), ranks, scales, AdapterValues(values));
  });
  return reinterpret_cast<PacelineAdapter*>(made);
}

int paceline_adapter_set(PacelineAdapter* adapter, int64_t layer, int matrix, const float* a, const float* b) {
  return guarded([&] { reinterpret_cast<Adapter*>(adapter)->set(layer, matrix, a, b); });
}

int64_t paceline_adapter_bytes(const PacelineAdapter* adapter) {
  return int64_t(reinterpret_cast<const Adapter*>(adapter)->bytes());
}

void paceline_adapter_destroy(PacelineAdapter* adapter) { delete reinterpret_cast<Adapter*>(adapter); }

void paceline_limits(int64_t* out) {
  out[0] = kWindowTiles * kTile - 1;
  out[1] = kPassPairs;
}

int paceline_copy_blocks(PacelineModel* model, const int64_t* from, const int64_t* to, int64_t count) {
  return guarded([&] { model->model.copy_blocks(from, to, count); });
}

int paceline_draw(PacelineModel* model, const PacelineDraw* draw) {
  return guarded([&] {
    if (model)
      model->model.draw(*draw);
    else
      caller_sampler().draw(best_kernels(), nullptr, *draw);
  });
}

int paceline_logprobs(PacelineModel* model, const PacelineLogprobs* logprobs) {
  return guarded([&] {
    if (model)
      model->model.logprobs(*logprobs);
    else
      caller_sampler().logprobs(best_kernels(), nullptr, *logprobs);
  });
}

int64_t paceline_block_bytes(const PacelineModel* model) { return model->model.block_bytes(); }

int64_t paceline_weight_bytes(const PacelineModel* model) { return int64_t(model->model.weight_bytes()); }

const char* paceline_isa(const PacelineModel* model) { return model->model.isa(); }

void paceline_profile(PacelineModel* model, int on) { model->model.set_profile(on != 0); }

void paceline_seconds(const PacelineModel* model, double* out) {
  memcpy(out, model->model.seconds().data(), sizeof(double) * kSections);
}

int paceline_attention(PacelineModel* model, const PacelineStep* step, float* qkv, float* out) {
  return guarded([&] { model->model.attention_only(*step, qkv, out); });
}

void* paceline_cache(PacelineModel* model, int64_t* bytes) { return model->model.cache(bytes); }

const char* paceline_variants_for(const uint32_t* cpuid, uint64_t states) {
  thread_local std::string names;
  names = names_of(kernels_for({cpuid[0], cpuid[1], cpuid[2], cpuid[3], states}));
  return names.c_str();
}

int paceline_traits(const char* isa, int64_t* out) {
  return guarded([&] {
    const Kernels* kernels = choose_kernels(isa);
    out[0] = kernels->narrow_sums;
    out[1] = kernels->acts[int(Weights::kBF16)] == Acts::kF32;
  });
}

double paceline_clock_hz(void) { return clock_hz(); }

PacelineMatrix* paceline_matrix(int weights, int type, const void* data, int64_t rows, int64_t columns, int threads,
                                const char* isa) {
  std::unique_ptr<PacelineMatrix> made;
  const int failed = guarded([&] {
    const int64_t stride = source_row_bytes(Source(type), columns);
    if (weights < 0 || weights >= kWeightKinds || rows < 1 || columns < 1 || stride < 0)
      throw std::invalid_argument("cannot hold a matrix of " + std::to_string(rows) + " x " + std::to_string(columns));
    made = std::make_unique<PacelineMatrix>(isa, threads);
    made->matrix = Matrix(Weights(weights), rows, columns, made->arena);
    if (!made->matrix.takes(Source(type)))
      throw std::invalid_argument("matrices of kind " + std::to_string(weights) + " hold blocks of their own type alone");
    std::vector<float> scratch(made->matrix.pack_scratch(), 0.0f);
    for (int64_t r = 0; r < rows; r += kPanel)
      made->matrix.pack_rows(r, rows - r < kPanel ? rows - r : kPanel, Source(type),
                             static_cast<const uint8_t*>(data) + r * stride, stride, *made->kernels, scratch.data());
  });
  return failed ? nullptr : made.release();
}

void paceline_matrix_destroy(PacelineMatrix* matrix) { delete matrix; }

int paceline_matrix_multiply(PacelineMatrix* m, const float* x, int64_t rows, float* y, int repeat) {
  return guarded([&] {
    const GemmArgs args = encoded(m, x, rows, y);
    const auto gemm = m->kernels->gemm[int(m->matrix.kind())];
    m->team.run([&](int member) {
      for (int i = 0; i < repeat; ++i)
        m->team.each(member, m->matrix.panel_count(), 4, [&](int64_t panel) { gemm(args, 0, rows, panel); });
    });
  });
}

// Products of the same rows with matrices of one shape, in turn: of enough of them, none stays in a cache.
double paceline_products_seconds(PacelineMatrix* const* matrices, int64_t count, const float* x, int64_t rows) {
  double seconds = -1;
  guarded([&] {
    PacelineMatrix* const first = matrices[0];
    Memory out(size_t(rows * first->matrix.rows()) * 4);
    GemmArgs args = encoded(first, x, rows, reinterpret_cast<float*>(out.data()));
    const auto gemm = first->kernels->gemm[int(first->matrix.kind())];
    const int64_t panels = first->matrix.panel_count();
    const auto began = std::chrono::steady_clock::now();
    first->team.run([&](int member) {
      for (int64_t i = 0; i < count; ++i) {
        GemmArgs own = args;
        own.w = matrices[i]->matrix.view();
        first->team.each(member, panels, 4, [&](int64_t panel) { gemm(own, 0, rows, panel); });
      }
    });
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  });
  return seconds;
}

double paceline_read_seconds(const void* data, int64_t bytes, int threads, int repeat) {
  double best = -1;
  guarded([&] { best = read_seconds(data, bytes, threads, repeat); });
  return best;
}

double paceline_peak(const char* isa, int weights, int threads) {
  double rate = -1;
  guarded([&] { rate = peak_rate(choose_kernels(isa)->name, Weights(weights), threads); });
  return rate;
}

int paceline_matrix_unpack(const PacelineMatrix* m, float* out) {
  return guarded([&] {
    for (int64_t r = 0; r < m->matrix.rows(); ++r) m->matrix.unpack_row(r, *m->kernels, out + r * m->matrix.columns());
  });
}

}  // extern "C"

