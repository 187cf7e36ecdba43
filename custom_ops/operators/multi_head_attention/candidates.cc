// Candidates of MultiHeadAttention: kernels of sd-ort, GEMMs of a BLAS library with a softmax kernel between, and the
// plans that cuDNN proposes (not on AMD).
#include <algorithm>

#include "common/blas_lt.h"
#include "common/check.h"
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "operators/multi_head_attention/op.h"
#include "operators/quantize_float8/op.h"
#include "operators/softmax/op.h"
#if !SD_ORT_HIP
#include "operators/multi_head_attention/cudnn.h"
#endif

namespace sd_ort {
namespace {

using Kernel = MultiHeadAttentionKernel;

// Large heads as two GEMMs of cuBLASLt or hipBLASLt with a softmax between, for a limited number of queries at a time,
// which limits the memory of the scores. The kernels of sd-ort hold the output of 64 queries of such a head in the
// registers of a block, at a tenth of the speed.
class GemmAttention {
 public:
  GemmAttention(const MultiHeadAttentionParams& p, int64_t scores_bytes) : p_(p) {
    const int64_t row_bytes = kFloatBytes * std::max<int64_t>(p.kv_sequence, 1);
    const int64_t max_rows = std::max(kRows, scores_bytes / row_bytes);
    rows_ = std::min(p.sequence, max_rows / kRows * kRows);
  }

  bool supported() const {
    if (p_.head_size < kMinHead || p_.dtype == DType::kFloat32 || p_.attention_bias != nullptr || p_.causal ||
        p_.kv_sequence % 8 != 0 || !multi_head_attention_supports(p_, Kernel::kLarge)) {
      return false;
    }
    BlasLt& library = BlasLt::instance();
    const int64_t rest = p_.sequence % std::max<int64_t>(rows_, 1);
    for (const int64_t rows : {rows_, rest}) {
      if (rows > 0 &&
          !(library.supports(scores(0, 0, 0, rows, nullptr), 0) && library.supports(sums(0, 0, 0, rows, nullptr), 0))) {
        return false;
      }
    }
    return rows_ > 0;
  }

  size_t workspace_bytes() const { return gemm_workspace() + (kFloatBytes + kHalfBytes) * rows_ * p_.kv_sequence; }

  const char* run(void* workspace, void* stream) const {
    BlasLt& library = BlasLt::instance();
    char* const scores_buffer = static_cast<char*>(workspace) + gemm_workspace();
    char* const weights_buffer = scores_buffer + kFloatBytes * rows_ * p_.kv_sequence;
    for (int64_t batch = 0; batch < p_.batch; ++batch) {
      for (int64_t head = 0; head < p_.heads; ++head) {
        for (int64_t row = 0; row < p_.sequence; row += rows_) {
          const int64_t rows = std::min(rows_, p_.sequence - row);
          SD_ORT_RETURN_ERROR(library.run(scores(batch, head, row, rows, scores_buffer), 0, workspace, stream));
          SD_ORT_RETURN_ERROR(normalize(scores_buffer, weights_buffer, rows, stream));
          SD_ORT_RETURN_ERROR(library.run(sums(batch, head, row, rows, weights_buffer), 0, workspace, stream));
        }
      }
    }
    return nullptr;
  }

 private:
  static constexpr int64_t kMinHead = 168;  // up to 160 the kernels of sd-ort are about as fast
  static constexpr int64_t kRows = 128;
  static constexpr size_t kFloatBytes = 4, kHalfBytes = 2;

  const char* at(const HeadsView& view, int64_t batch, int64_t head, int64_t row) const {
    const int64_t element = batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
    return static_cast<const char*>(view.data) + element * static_cast<int64_t>(size_of(p_.dtype));
  }

  const char* normalize(const void* scores, void* weights, int64_t rows, void* stream) const {
    const SoftmaxParams softmax = {p_.dtype, scores, weights, rows, p_.kv_sequence};
    return softmax_launch(softmax, softmax_default(softmax), stream);
  }

  BlasLt::Gemm scores(int64_t batch, int64_t head, int64_t row, int64_t rows, void* to) const {
    BlasLt::Gemm gemm{p_.dtype,
                      at(p_.query, batch, head, row),
                      at(p_.key, batch, p_.kv_head(head), 0),
                      nullptr,
                      nullptr,
                      to,
                      rows,
                      p_.head_size,
                      p_.kv_sequence};
    gemm.transposed = gemm.float32_y = true;
    gemm.x_stride = p_.query.row_stride;
    gemm.weight_stride = p_.key.row_stride;
    gemm.scale = p_.scale;
    return gemm;
  }

  BlasLt::Gemm sums(int64_t batch, int64_t head, int64_t row, int64_t rows, const void* weights) const {
    const HeadsView output = {p_.output, p_.sequence * p_.heads * p_.head_size, p_.heads * p_.head_size, p_.head_size};
    void* const to = const_cast<char*>(at(output, batch, head, row));
    BlasLt::Gemm gemm{p_.dtype,       weights,     at(p_.value, batch, p_.kv_head(head), 0), nullptr, nullptr, to, rows,
                      p_.kv_sequence, p_.head_size};
    gemm.weight_stride = p_.value.row_stride;
    gemm.y_stride = output.row_stride;
    return gemm;
  }

  // Workspace shared by both GEMMs, a multiple of 256 bytes, after which the scores begin.
  size_t gemm_workspace() const {
    size_t bytes = 0;
    const int64_t rest = p_.sequence % rows_;
    for (const int64_t rows : {rows_, rest}) {
      if (rows == 0) continue;
      bytes = std::max({bytes, BlasLt::instance().workspace_bytes(scores(0, 0, 0, rows, nullptr), 0),
                        BlasLt::instance().workspace_bytes(sums(0, 0, 0, rows, nullptr), 0)});
    }
    return (bytes + 255) / 256 * 256;
  }

  const MultiHeadAttentionParams& p_;
  int64_t rows_;
};

// `scores_bytes`: size of the float32 scores that are computed at a time.
Candidate<MultiHeadAttentionParams> gemm_candidate(const char* name, int64_t scores_bytes) {
  using Params = MultiHeadAttentionParams;
  return {name, [=](const Params& p) { return GemmAttention(p, scores_bytes).supported(); },
          [=](const Params& p, void* workspace, void* stream) {
            return GemmAttention(p, scores_bytes).run(workspace, stream);
          },
          [=](const Params& p) { return GemmAttention(p, scores_bytes).workspace_bytes(); }};
}

#if !SD_ORT_HIP
constexpr int kPlans = 4;
constexpr int64_t kMaxCudnnHead = 256;  // beyond it GEMMs are the default

Candidate<MultiHeadAttentionParams> library_candidate(int index) {
  using Params = MultiHeadAttentionParams;
  return {
      "cudnn_" + std::to_string(index), [=](const Params& p) { return CudnnAttention(p).supports(index); },
      [=](const Params& p, void* workspace, void* stream) { return CudnnAttention(p).run(index, workspace, stream); },
      [=](const Params& p) { return CudnnAttention(p).workspace_bytes(index); }};
}
#endif

// A candidate of a library, which writes the output in T alone: a second kernel quantizes it, from the workspace if the
// output itself is not requested.
Candidate<MultiHeadAttentionParams> then_float8(Candidate<MultiHeadAttentionParams> library) {
  using Params = MultiHeadAttentionParams;
  constexpr int64_t kAlignment = 256;
  const auto count = [](const Params& p) { return p.batch * p.sequence * p.heads * p.head_size; };
  const auto bytes = [=](const Params& p) -> size_t {
    return p.output != nullptr ? 0 : ceil_div(count(p) * size_of(p.dtype), kAlignment) * kAlignment;
  };
  const auto unquantized = [](Params p, void* output) {
    p.quantized = {};
    if (p.output == nullptr) p.output = output;
    return p;
  };
  return {library.name, [=](const Params& p) { return library.is_supported(unquantized(p, nullptr)); },
          [=](const Params& p, void* workspace, void* stream) {
            const Params in_half = unquantized(p, workspace);
            SD_ORT_RETURN_ERROR(library.run(in_half, static_cast<char*>(workspace) + bytes(p), stream));
            if (p.quantized.data == nullptr) return static_cast<const char*>(nullptr);
            const QuantizeFloat8Params quantize = {p.dtype, in_half.output, p.quantized, count(p)};
            return quantize_float8_launch(quantize, quantize_float8_supports_vectors(quantize), stream);
          },
          [=](const Params& p) { return bytes(p) + library.workspace_bytes(unquantized(p, nullptr)); }};
}

constexpr struct {
  const char* name;
  Kernel kernel;
} kKernels[] = {{"generic", Kernel::kGeneric},
                {"large_tiles", Kernel::kLarge},
                {"small_tiles", Kernel::kSmall},
                {"short_keys", Kernel::kShort},
                {"warpgroup", Kernel::kWarpgroup},
                {"two_warpgroups", Kernel::kTwoWarpgroups},
                {"short_warpgroup", Kernel::kShortWarpgroup},
                {"full_tiles", Kernel::kFullTiles},
                {"pingpong_warpgroups", Kernel::kPingpong}};

constexpr int64_t kScoresBytes = 128 << 20, kScoresInCacheBytes = 24 << 20;

std::vector<Candidate<MultiHeadAttentionParams>> candidates() {
  using Params = MultiHeadAttentionParams;
  std::vector<Candidate<Params>> all;
  for (const auto& [name, kernel] : kKernels) {
    all.push_back({name, [kernel = kernel](const Params& p) { return multi_head_attention_supports(p, kernel); },
                   [kernel = kernel](const Params& p, void*, void* stream) {
                     return multi_head_attention_launch(p, kernel, stream);
                   }});
  }
  all.push_back(then_float8(gemm_candidate("gemm", kScoresBytes)));
  all.push_back(then_float8(gemm_candidate("gemm_in_cache", kScoresInCacheBytes)));
#if !SD_ORT_HIP
  for (int index = 0; index < kPlans; ++index) all.push_back(then_float8(library_candidate(index)));
#endif
  return all;
}

std::string default_name(const MultiHeadAttentionParams& call) {
  // A library's output in float8 takes another launch: our kernel is ahead where the attention itself is short.
  if (call.quantized.data != nullptr && multi_head_attention_supports(call, Kernel::kShortWarpgroup)) {
    return "short_warpgroup";
  }
  if (multi_head_attention_prefers_pingpong(call)) return "pingpong_warpgroups";
  MultiHeadAttentionParams p = call;
  p.quantized = {};
#if !SD_ORT_HIP
  if (p.head_size <= kMaxCudnnHead && CudnnAttention(p).supports(0)) return "cudnn_0";
#endif
  if (GemmAttention(p, kScoresBytes).supported()) return "gemm";
  const Kernel best = multi_head_attention_default(p);
  for (const auto& [name, kernel] : kKernels) {
    if (kernel == best) return name;
  }
  return "generic";
}

}  // namespace

const GpuOp& multi_head_attention_gpu() {
  static const TunableOp<MultiHeadAttentionParams> op("MultiHeadAttention", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
