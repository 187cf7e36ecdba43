// Candidates of NhwcWinograd, which differ in their GEMMs: the generic or the tile kernel of NhwcConv, one GEMM at a
// time, or the algorithms that cuBLASLt or hipBLASLt proposes for the batch, best first. Also as candidates of
// NhwcConv.
#include <algorithm>

#include "common/blas_lt.h"
#include "common/check.h"
#include "common/tunable.h"
#include "operators/nhwc_conv/winograd.h"
#include "operators/nhwc_winograd/op.h"

namespace sd_ort {

const GpuOp& nhwc_winograd_gpu();

namespace {

using Params = NhwcWinogradParams;

constexpr int kAlgorithms = 4;
// Size of transformed pixels and products: larger calls are divided. Ranges that fit an H200's cache (32 MB) were 11 to
// 50 % slower.
#if defined(SD_ORT_EMULATED)
constexpr int64_t kMaxBytes = 64 << 10;  // also divides the small images of tests
#else
constexpr int64_t kMaxBytes = 256 << 20;
#endif
constexpr size_t kAlignment = 256;

int64_t matrices(const Params& p) { return p.side() * p.side(); }

// Division of a call into ranges of `tiles` tiles; the last has `last`.
struct TileRanges {
  int64_t tiles, count, last;

  explicit TileRanges(const Params& p) {
    const int64_t all = winograd_tiles(p);
    const int64_t tile_bytes = matrices(p) * (p.channels + p.filter_count) * static_cast<int64_t>(size_of(p.dtype));
    count = std::max<int64_t>(1, std::min(all, ceil_div(all * tile_bytes, kMaxBytes)));
    tiles = ceil_div(all, count);
    count = tiles == 0 ? 0 : ceil_div(all, tiles);
    last = all - (count - 1) * tiles;
  }
  WinogradTiles operator[](int64_t i) const { return {i * tiles, i + 1 == count ? last : tiles}; }
};

// Offsets in the workspace: products of a range, their end, and the workspace of the GEMM. Pixels are at 0.
struct WorkspaceLayout {
  size_t products, end, gemm;

  WorkspaceLayout(const Params& p, int64_t tiles) {
    const auto aligned = [](size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
    const size_t channel_bytes = matrices(p) * tiles * size_of(p.dtype);
    products = aligned(channel_bytes * p.channels);
    end = products + channel_bytes * p.filter_count;
    gemm = aligned(end);
  }
};

// Multiplies the pixels of a range (side^2, tiles, channels) by the filters to (side^2, tiles, filter_count).
using Multiply = std::function<const char*(const Params& p, int64_t tiles, const void* pixels, void* products,
                                           void* workspace, void* stream)>;

const char* run(const Params& p, const Multiply& multiply, void* workspace, void* stream) {
  const TileRanges ranges(p);
  const WorkspaceLayout layout(p, ranges.tiles);
  char* const pixels = static_cast<char*>(workspace);
  char* const products = pixels + layout.products;
  for (int64_t i = 0; i < ranges.count; ++i) {
    const WinogradTiles range = ranges[i];
    SD_ORT_RETURN_ERROR(winograd_input_launch(p, range, pixels, stream));
    SD_ORT_RETURN_ERROR(multiply(p, range.tiles, pixels, products, pixels + layout.gemm, stream));
    SD_ORT_RETURN_ERROR(winograd_output_launch(p, range, products, stream));
  }
  return nullptr;
}

bool is_supported(const Params& p) { return winograd_tiles(p) < INT32_MAX && p.channels > 0; }

// GEMM `index` as a 1 x 1 convolution, for the kernels of NhwcConv.
NhwcConvParams as_conv(const Params& p, int64_t index, int64_t tiles, const void* pixels, void* products) {
  const int64_t bytes = static_cast<int64_t>(size_of(p.dtype));
  return nhwc_conv_product(p.dtype, static_cast<const char*>(pixels) + index * tiles * p.channels * bytes,
                           static_cast<const char*>(p.filters) + index * p.filter_count * p.channels * bytes,
                           static_cast<char*>(products) + index * tiles * p.filter_count * bytes, tiles, p.channels,
                           p.filter_count);
}

// Candidate that launches a kernel of NhwcConv for each GEMM.
Candidate<Params> conv_candidate(const char* name, std::function<bool(const Params&)> supports,
                                 const char* (*launch)(const NhwcConvParams&, void* stream)) {
  const Multiply multiply = [=](const Params& p, int64_t tiles, const void* pixels, void* products, void*,
                                void* stream) {
    const char* error = nullptr;
    for (int64_t i = 0; i < matrices(p) && error == nullptr; ++i) {
      error = launch(as_conv(p, i, tiles, pixels, products), stream);
    }
    return error;
  };
  return {name, supports,
          [=](const Params& p, void* workspace, void* stream) { return run(p, multiply, workspace, stream); },
          [](const Params& p) { return WorkspaceLayout(p, TileRanges(p).tiles).end; }};
}

Candidate<Params> generic() {
  return conv_candidate("generic", [](const Params&) { return true; }, nhwc_conv_launch);
}

Candidate<Params> tiles() {
  const auto supports = [](const Params& p) {
    return is_supported(p) && nhwc_conv_tiles_supports(as_conv(p, 0, TileRanges(p).tiles, nullptr, nullptr));
  };
  return conv_candidate("tiles", supports, [](const NhwcConvParams& conv, void* stream) {
    return nhwc_conv_tiles_launch(conv, 1, nullptr, stream);
  });
}

// The batch of all GEMMs. Null pointers are for queries about the shape.
BlasLt::Gemm gemm(const Params& p, int64_t tiles, const void* pixels = nullptr, void* products = nullptr) {
  BlasLt::Gemm batch{};
  batch.dtype = p.dtype;
  batch.x = pixels;
  batch.weight = p.filters;
  batch.y = products;
  batch.rows = tiles;
  batch.inner = p.channels;
  batch.columns = p.filter_count;
  batch.transposed = true;
  batch.batch = static_cast<int32_t>(matrices(p));
  return batch;
}

Candidate<Params> library_candidate(int index) {
  const auto supports = [=](const Params& p) {
    if (!is_supported(p)) return false;
    const TileRanges ranges(p);
    BlasLt& library = BlasLt::instance();
    return library.supports(gemm(p, ranges.tiles), index) && library.supports(gemm(p, ranges.last), index);
  };
  const Multiply multiply = [=](const Params& p, int64_t tiles, const void* pixels, void* products, void* workspace,
                                void* stream) {
    return BlasLt::instance().run(gemm(p, tiles, pixels, products), index, workspace, stream);
  };
  const auto launch = [=](const Params& p, void* workspace, void* stream) {
    return run(p, multiply, workspace, stream);
  };
  const auto bytes = [=](const Params& p) {
    const TileRanges ranges(p);
    BlasLt& library = BlasLt::instance();
    return WorkspaceLayout(p, ranges.tiles).gemm + std::max(library.workspace_bytes(gemm(p, ranges.tiles), index),
                                                            library.workspace_bytes(gemm(p, ranges.last), index));
  };
  return {"blas_lt_" + std::to_string(index), supports, launch, bytes};
}

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {generic(), tiles()};
  for (int index = 0; index < kAlgorithms; ++index) all.push_back(library_candidate(index));
  return all;
}

// The first proposal of the library if it supports the GEMMs.
std::string default_name(const Params& p) {
  for (const Candidate<Params>& candidate : {library_candidate(0), tiles()}) {
    if (candidate.is_supported(p)) return candidate.name;
  }
  return "generic";
}

Params as_winograd(const NhwcConvParams& p) {
  return {p.dtype, p.x,        p.transformed_filters, p.bias, p.skip, p.y, p.batch, p.height,
          p.width, p.channels, p.filter_count,        0};
}

std::string conv_name(int candidate) {
  return std::string("winograd_") + nhwc_winograd_gpu().candidate_name(candidate);
}

}  // namespace

std::vector<Candidate<NhwcConvParams>> nhwc_conv_winograd_candidates() {
  const GpuOp& op = nhwc_winograd_gpu();
  std::vector<Candidate<NhwcConvParams>> all;
  for (int index = 1; index < op.candidate_count(); ++index) {
    const auto supports = [=, &op](const NhwcConvParams& p) {
      const Params params = as_winograd(p);
      return p.transformed_filters != nullptr && p.relu == 0 && op.is_supported(index, &params);
    };
    const auto run = [=, &op](const NhwcConvParams& p, void* workspace, void* stream) {
      const Params params = as_winograd(p);
      return op.run(index, &params, workspace, stream);
    };
    const auto bytes = [=, &op](const NhwcConvParams& p) {
      const Params params = as_winograd(p);
      return op.workspace_bytes(index, &params);
    };
    all.push_back({conv_name(index), supports, run, bytes});
  }
  return all;
}

std::string nhwc_conv_winograd_default(const NhwcConvParams& p) {
  if (p.transformed_filters == nullptr || p.relu != 0) return "";
  const Params params = as_winograd(p);
  const int candidate = nhwc_winograd_gpu().default_candidate(&params);
  return candidate > 0 ? conv_name(candidate) : "";
}

int64_t winograd_tiles(const NhwcWinogradParams& p) {
  const int64_t pixels = p.upsampled == 0 ? 2 : 1;  // pixels of x along an axis of a tile
  return p.batch * ceil_div(p.height, pixels) * ceil_div(p.width, pixels);
}

const GpuOp& nhwc_winograd_gpu() {
  static const TunableOp<Params> op("NhwcWinograd", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
