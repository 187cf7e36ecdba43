// The ways to run MultiHeadAttention on a GPU, and the default by head size and number of blocks.
#include <algorithm>

#include "common/blas_lt.h"
#include "common/check.h"
#include "common/tunable.h"
#include "multi_head_attention/op.h"
#include "softmax/op.h"

namespace sd_ort {
namespace {

using Kernel = MultiHeadAttentionKernel;

// Blocks under which large tiles leave much of a large GPU idle.
constexpr int64_t kManyBlocks = 400;

// Wide heads as two products of cuBLASLt or hipBLASLt with a softmax between: some queries at a time, so that their
// scores stay few. Our kernels hold 64 queries' output of such a head in the registers of a whole block, and run at a
// tenth of the speed.
class Products {
 public:
  Products(const MultiHeadAttentionParams& p, int64_t scores_bytes) : p_(p) {
    const int64_t row_bytes = kFloatBytes * std::max<int64_t>(p.kv_sequence, 1);
    const int64_t most = std::max(kRows, scores_bytes / row_bytes);
    rows_ = std::min(p.sequence, most / kRows * kRows);
  }

  bool supported() const {
    if (p_.head_size < kSmallestHead || p_.dtype == DType::kFloat32 || p_.attention_bias != nullptr || p_.causal ||
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

  size_t workspace_bytes() const { return product_bytes() + (kFloatBytes + kHalfBytes) * rows_ * p_.kv_sequence; }

  const char* run(void* workspace, void* stream) const {
    BlasLt& library = BlasLt::instance();
    char* const scores_at = static_cast<char*>(workspace) + product_bytes();
    char* const weights_at = scores_at + kFloatBytes * rows_ * p_.kv_sequence;
    for (int64_t batch = 0; batch < p_.batch; ++batch) {
      for (int64_t head = 0; head < p_.heads; ++head) {
        for (int64_t row = 0; row < p_.sequence; row += rows_) {
          const int64_t rows = std::min(rows_, p_.sequence - row);
          SD_ORT_RETURN_ERROR(library.run(scores(batch, head, row, rows, scores_at), 0, workspace, stream));
          SD_ORT_RETURN_ERROR(softmax_launch({p_.dtype, scores_at, weights_at, rows, p_.kv_sequence}, stream));
          SD_ORT_RETURN_ERROR(library.run(sums(batch, head, row, rows, weights_at), 0, workspace, stream));
        }
      }
    }
    return nullptr;
  }

 private:
  static constexpr int64_t kSmallestHead = 168;  // up to 160 our kernels are near the vendors'
  static constexpr int64_t kRows = 128;
  static constexpr size_t kFloatBytes = 4, kHalfBytes = 2;

  const char* at(const HeadsView& view, int64_t batch, int64_t head, int64_t row) const {
    const int64_t element = batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
    return static_cast<const char*>(view.data) + element * static_cast<int64_t>(size_of(p_.dtype));
  }

  BlasLt::Product scores(int64_t batch, int64_t head, int64_t row, int64_t rows, void* to) const {
    BlasLt::Product product{p_.dtype,
                            at(p_.query, batch, head, row),
                            at(p_.key, batch, head, 0),
                            nullptr,
                            nullptr,
                            to,
                            rows,
                            p_.head_size,
                            p_.kv_sequence};
    product.transposed = product.float32_y = true;
    product.x_stride = p_.query.row_stride;
    product.weight_stride = p_.key.row_stride;
    product.scale = p_.scale;
    return product;
  }

  BlasLt::Product sums(int64_t batch, int64_t head, int64_t row, int64_t rows, const void* weights) const {
    const HeadsView output = {p_.output, p_.sequence * p_.heads * p_.head_size, p_.heads * p_.head_size, p_.head_size};
    void* const to = const_cast<char*>(at(output, batch, head, row));
    BlasLt::Product product{p_.dtype,       weights,     at(p_.value, batch, head, 0), nullptr, nullptr, to, rows,
                            p_.kv_sequence, p_.head_size};
    product.weight_stride = p_.value.row_stride;
    product.y_stride = output.row_stride;
    return product;
  }

  // Both products use the same workspace in turn; a multiple of 256, where the scores begin.
  size_t product_bytes() const {
    size_t most = 0;
    const int64_t rest = p_.sequence % rows_;
    for (const int64_t rows : {rows_, rest}) {
      if (rows == 0) continue;
      most = std::max({most, BlasLt::instance().workspace_bytes(scores(0, 0, 0, rows, nullptr), 0),
                       BlasLt::instance().workspace_bytes(sums(0, 0, 0, rows, nullptr), 0)});
    }
    return (most + 255) / 256 * 256;
  }

  const MultiHeadAttentionParams& p_;
  int64_t rows_;
};

// `scores_bytes`: of float32 scores at a time.
Candidate<MultiHeadAttentionParams> products(const char* name, int64_t scores_bytes) {
  using Params = MultiHeadAttentionParams;
  return {
      name, [=](const Params& p) { return Products(p, scores_bytes).supported(); },
      [=](const Params& p, void* workspace, void* stream) { return Products(p, scores_bytes).run(workspace, stream); },
      [=](const Params& p) { return Products(p, scores_bytes).workspace_bytes(); }};
}

Kernel default_kernel(const MultiHeadAttentionParams& p) {
  const bool many = (p.sequence + 127) / 128 * p.heads * p.batch >= kManyBlocks;
  const Kernel warpgroups = many ? Kernel::kTwoWarpgroups : Kernel::kWarpgroup;
  const Kernel waves = many ? Kernel::kLarge : Kernel::kSmall;
  for (Kernel kernel : {Kernel::kShort, warpgroups, waves, Kernel::kLarge}) {
    if (multi_head_attention_supports(p, kernel)) return kernel;
  }
  return Kernel::kPlain;
}

Candidate<MultiHeadAttentionParams> candidate(const char* name, Kernel kernel) {
  return {name, [kernel](const MultiHeadAttentionParams& p) { return multi_head_attention_supports(p, kernel); },
          [kernel](const MultiHeadAttentionParams& p, void*, void* stream) {
            return multi_head_attention_launch(p, kernel, stream);
          }};
}

}  // namespace

const GpuOp& multi_head_attention_gpu() {
  static const TunableOp<MultiHeadAttentionParams> op(
      "MultiHeadAttention", {products("products", 128 << 20),
                             products("products_in_cache", 24 << 20),
                             {"default", [](const MultiHeadAttentionParams&) { return true; },
                              [](const MultiHeadAttentionParams& p, void*, void* stream) {
                                return multi_head_attention_launch(p, default_kernel(p), stream);
                              }},
                             candidate("large_tiles", Kernel::kLarge),
                             candidate("small_tiles", Kernel::kSmall),
                             candidate("short_keys", Kernel::kShort),
                             candidate("warpgroup", Kernel::kWarpgroup),
                             candidate("two_warpgroups", Kernel::kTwoWarpgroups),
                             candidate("plain", Kernel::kPlain)});
  return op;
}

}  // namespace sd_ort
