// The ways to run NhwcWinograd, which differ in their products: a thread an element, matrix instructions of ours, or
// the algorithms that cuBLASLt or hipBLASLt proposes for 16 products at once, its favorite first; and in how many tiles
// they take at a time: as many as the workspace may hold, or as a GPU's cache does.
#include <algorithm>

#include "common/blas_lt.h"
#include "common/tunable.h"
#include "nhwc_conv/op.h"
#include "nhwc_winograd/op.h"

namespace sd_ort {
namespace {

using Params = NhwcWinogradParams;

constexpr int kAlgorithms = 4, kAlgorithmsInCache = 2;
constexpr int64_t kProducts = 16;
constexpr int64_t kMostBytes = 256 << 20;  // of pixels and products
constexpr int64_t kCacheBytes = 32 << 20;  // that stay in the cache of a large GPU (H200: 50 MB)
constexpr int64_t kAlignment = 256;

// How a call is cut up: all pieces but the last have `tiles`.
struct Cut {
  int64_t tiles, pieces, last;

  Cut(const Params& p, int64_t most_bytes) {
    const int64_t all = winograd_tiles(p);
    const int64_t a_tile = kProducts * (p.channels + p.filter_count) * static_cast<int64_t>(size_of(p.dtype));
    pieces = std::max<int64_t>(1, std::min(all, ceil_div(all * a_tile, most_bytes)));
    tiles = ceil_div(all, pieces);
    pieces = tiles == 0 ? 0 : ceil_div(all, tiles);
    last = all - (pieces - 1) * tiles;
  }
  WinogradPiece operator[](int64_t i) const { return {i * tiles, i + 1 == pieces ? last : tiles}; }
};

// Where a piece's pixels and products lie in the workspace, and what the product may use behind them.
struct Workshop {
  size_t products, rest;

  Workshop(const Params& p, int64_t tiles) {
    const auto bytes = [&](int64_t channels) {
      return ceil_div(kProducts * tiles * channels * static_cast<int64_t>(size_of(p.dtype)), kAlignment) * kAlignment;
    };
    products = bytes(p.channels);
    rest = products + bytes(p.filter_count);
  }
};

// A product of a piece: pixels (16, tiles, channels) by the filters, as (16, tiles, filter_count).
using Multiply = std::function<const char*(const Params& p, int64_t tiles, const void* pixels, void* products,
                                           void* workspace, void* stream)>;

const char* run(const Params& p, int64_t most_bytes, const Multiply& multiply, void* workspace, void* stream) {
  const Cut cut(p, most_bytes);
  const Workshop place(p, cut.tiles);
  char* const pixels = static_cast<char*>(workspace);
  char* const products = pixels + place.products;
  for (int64_t i = 0; i < cut.pieces; ++i) {
    const WinogradPiece piece = cut[i];
    const char* error = winograd_input_launch(p, piece, pixels, stream);
    if (error == nullptr) error = multiply(p, piece.tiles, pixels, products, pixels + place.rest, stream);
    if (error == nullptr) error = winograd_output_launch(p, piece, products, stream);
    if (error != nullptr) return error;
  }
  return nullptr;
}

bool has_numbers(const Params& p) { return winograd_tiles(p) < INT32_MAX && p.channels > 0; }

// One of the 16 products as a 1 x 1 convolution of NhwcConv's kernels.
NhwcConvParams one(const Params& p, int64_t number, int64_t tiles, const void* pixels, void* products) {
  const int64_t bytes = static_cast<int64_t>(size_of(p.dtype));
  NhwcConvParams conv{};
  conv.dtype = p.dtype;
  conv.x = static_cast<const char*>(pixels) + number * tiles * p.channels * bytes;
  conv.filters = static_cast<const char*>(p.filters) + number * p.filter_count * p.channels * bytes;
  conv.y = static_cast<char*>(products) + number * tiles * p.filter_count * bytes;
  conv.batch = conv.height = conv.out_height = conv.kernel_height = conv.kernel_width = conv.groups = 1;
  conv.stride_height = conv.stride_width = conv.dilation_height = conv.dilation_width = 1;
  conv.width = conv.out_width = tiles;
  conv.channels = p.channels;
  conv.filter_count = p.filter_count;
  return conv;
}

template <class Launch>
Multiply one_by_one(Launch launch) {
  return [=](const Params& p, int64_t tiles, const void* pixels, void* products, void*, void* stream) {
    const char* error = nullptr;
    for (int64_t i = 0; i < kProducts && error == nullptr; ++i) {
      error = launch(one(p, i, tiles, pixels, products), stream);
    }
    return error;
  };
}

size_t without_rest(const Params& p) { return Workshop(p, Cut(p, kMostBytes).tiles).rest; }

Candidate<Params> plain() {
  const auto supports = [](const Params&) { return true; };
  const Multiply multiply =
      one_by_one([](const NhwcConvParams& conv, void* stream) { return nhwc_conv_launch(conv, stream); });
  return {
      "plain", supports,
      [=](const Params& p, void* workspace, void* stream) { return run(p, kMostBytes, multiply, workspace, stream); },
      without_rest};
}

Candidate<Params> tiles() {
  const auto supports = [](const Params& p) {
    return has_numbers(p) && nhwc_conv_tiles_supports(one(p, 0, Cut(p, kMostBytes).tiles, nullptr, nullptr));
  };
  const Multiply multiply = one_by_one(
      [](const NhwcConvParams& conv, void* stream) { return nhwc_conv_tiles_launch(conv, 1, nullptr, stream); });
  return {
      "tiles", supports,
      [=](const Params& p, void* workspace, void* stream) { return run(p, kMostBytes, multiply, workspace, stream); },
      without_rest};
}

// All 16 in one call. `pixels` and the others: for questions about a shape, anything aligned.
BlasLt::Product product(const Params& p, int64_t tiles, const void* pixels = nullptr, void* products = nullptr) {
  BlasLt::Product all{};
  all.dtype = p.dtype;
  all.x = pixels;
  all.weight = p.filters;
  all.y = products;
  all.rows = tiles;
  all.inner = p.channels;
  all.columns = p.filter_count;
  all.transposed = true;
  all.batch = kProducts;
  return all;
}

Candidate<Params> library_candidate(const std::string& prefix, int number, int64_t most_bytes) {
  const auto supports = [=](const Params& p) {
    if (!has_numbers(p)) return false;
    const Cut cut(p, most_bytes);
    const bool differs = most_bytes == kMostBytes || cut.pieces > Cut(p, kMostBytes).pieces;
    BlasLt& library = BlasLt::instance();
    return differs && library.supports(product(p, cut.tiles), number) && library.supports(product(p, cut.last), number);
  };
  const Multiply multiply = [=](const Params& p, int64_t tiles, const void* pixels, void* products, void* workspace,
                                void* stream) {
    return BlasLt::instance().run(product(p, tiles, pixels, products), number, workspace, stream);
  };
  const auto launch = [=](const Params& p, void* workspace, void* stream) {
    return run(p, most_bytes, multiply, workspace, stream);
  };
  const auto bytes = [=](const Params& p) {
    const Cut cut(p, most_bytes);
    BlasLt& library = BlasLt::instance();
    return Workshop(p, cut.tiles).rest + std::max(library.workspace_bytes(product(p, cut.tiles), number),
                                                  library.workspace_bytes(product(p, cut.last), number));
  };
  return {prefix + std::to_string(number), supports, launch, bytes};
}

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {plain(), tiles()};
  for (int i = 0; i < kAlgorithms; ++i) all.push_back(library_candidate("blas_lt_", i, kMostBytes));
  for (int i = 0; i < kAlgorithmsInCache; ++i) all.push_back(library_candidate("in_cache_", i, kCacheBytes));
  return all;
}

// The library's favorite, where it takes the products.
std::string default_name(const Params& p) {
  const Candidate<Params> favorite = library_candidate("blas_lt_", 0, kMostBytes), own = tiles();
  if (favorite.is_supported(p)) return favorite.name;
  return own.is_supported(p) ? own.name : "plain";
}

}  // namespace

int64_t winograd_tiles(const NhwcWinogradParams& p) { return p.batch * ceil_div(p.height, 2) * ceil_div(p.width, 2); }

const GpuOp& nhwc_winograd_gpu() {
  static const TunableOp<Params> op("NhwcWinograd", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
