// The ways to run NhwcWinograd, which differ in their products: a thread an element, matrix instructions of ours, or
// the algorithms that cuBLASLt or hipBLASLt proposes for all products at once, its favorite first.
#include <algorithm>

#include "common/blas_lt.h"
#include "common/tunable.h"
#include "operators/nhwc_conv/op.h"
#include "operators/nhwc_winograd/op.h"

namespace sd_ort {
namespace {

using Params = NhwcWinogradParams;

constexpr int kAlgorithms = 4;
// Of pixels and products: larger calls go piece by piece. Pieces that stay in an H200's cache (32 MB) were 11 to 50 %
// slower.
#if defined(SD_ORT_EMULATED)
constexpr int64_t kMostBytes = 64 << 10;  // cuts the tests' small images, too
#else
constexpr int64_t kMostBytes = 256 << 20;
#endif
constexpr size_t kAlignment = 256;

int64_t matrices(const Params& p) { return p.side() * p.side(); }

// How a call is cut up: all pieces but the last have `tiles`.
struct Cut {
  int64_t tiles, pieces, last;

  explicit Cut(const Params& p) {
    const int64_t all = winograd_tiles(p);
    const int64_t a_tile = matrices(p) * (p.channels + p.filter_count) * static_cast<int64_t>(size_of(p.dtype));
    pieces = std::max<int64_t>(1, std::min(all, ceil_div(all * a_tile, kMostBytes)));
    tiles = ceil_div(all, pieces);
    pieces = tiles == 0 ? 0 : ceil_div(all, tiles);
    last = all - (pieces - 1) * tiles;
  }
  WinogradPiece operator[](int64_t i) const { return {i * tiles, i + 1 == pieces ? last : tiles}; }
};

// Where a piece's pixels and products lie in the workspace, and what the product may use behind them.
struct Workshop {
  size_t products, end, rest;

  Workshop(const Params& p, int64_t tiles) {
    const auto aligned = [](size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
    const size_t a_channel = matrices(p) * tiles * size_of(p.dtype);
    products = aligned(a_channel * p.channels);
    end = products + a_channel * p.filter_count;
    rest = aligned(end);
  }
};

// The products of a piece: pixels (side^2, tiles, channels) by the filters, as (side^2, tiles, filter_count).
using Multiply = std::function<const char*(const Params& p, int64_t tiles, const void* pixels, void* products,
                                           void* workspace, void* stream)>;

const char* run(const Params& p, const Multiply& multiply, void* workspace, void* stream) {
  const Cut cut(p);
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

// One of the products as a 1 x 1 convolution of NhwcConv's kernels.
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
    for (int64_t i = 0; i < matrices(p) && error == nullptr; ++i) {
      error = launch(one(p, i, tiles, pixels, products), stream);
    }
    return error;
  };
}

size_t without_library(const Params& p) { return Workshop(p, Cut(p).tiles).end; }

Candidate<Params> plain() {
  const auto supports = [](const Params&) { return true; };
  const Multiply multiply =
      one_by_one([](const NhwcConvParams& conv, void* stream) { return nhwc_conv_launch(conv, stream); });
  return {"plain", supports,
          [=](const Params& p, void* workspace, void* stream) { return run(p, multiply, workspace, stream); },
          without_library};
}

Candidate<Params> tiles() {
  const auto supports = [](const Params& p) {
    return has_numbers(p) && nhwc_conv_tiles_supports(one(p, 0, Cut(p).tiles, nullptr, nullptr));
  };
  const Multiply multiply = one_by_one(
      [](const NhwcConvParams& conv, void* stream) { return nhwc_conv_tiles_launch(conv, 1, nullptr, stream); });
  return {"tiles", supports,
          [=](const Params& p, void* workspace, void* stream) { return run(p, multiply, workspace, stream); },
          without_library};
}

// All in one call. `pixels` and the others: for questions about a shape, anything aligned.
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
  all.batch = static_cast<int32_t>(matrices(p));
  return all;
}

Candidate<Params> library_candidate(int number) {
  const auto supports = [=](const Params& p) {
    if (!has_numbers(p)) return false;
    const Cut cut(p);
    BlasLt& library = BlasLt::instance();
    return library.supports(product(p, cut.tiles), number) && library.supports(product(p, cut.last), number);
  };
  const Multiply multiply = [=](const Params& p, int64_t tiles, const void* pixels, void* products, void* workspace,
                                void* stream) {
    return BlasLt::instance().run(product(p, tiles, pixels, products), number, workspace, stream);
  };
  const auto launch = [=](const Params& p, void* workspace, void* stream) {
    return run(p, multiply, workspace, stream);
  };
  const auto bytes = [=](const Params& p) {
    const Cut cut(p);
    BlasLt& library = BlasLt::instance();
    return Workshop(p, cut.tiles).rest + std::max(library.workspace_bytes(product(p, cut.tiles), number),
                                                  library.workspace_bytes(product(p, cut.last), number));
  };
  return {"blas_lt_" + std::to_string(number), supports, launch, bytes};
}

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {plain(), tiles()};
  for (int number = 0; number < kAlgorithms; ++number) all.push_back(library_candidate(number));
  return all;
}

// The library's favorite, where it takes the products.
std::string default_name(const Params& p) {
  const Candidate<Params> favorite = library_candidate(0), own = tiles();
  if (favorite.is_supported(p)) return favorite.name;
  return own.is_supported(p) ? own.name : "plain";
}

}  // namespace

int64_t winograd_tiles(const NhwcWinogradParams& p) {
  const int64_t pixels = p.doubled == 0 ? 2 : 1;  // of x, on an axis of a tile
  return p.batch * ceil_div(p.height, pixels) * ceil_div(p.width, pixels);
}

const GpuOp& nhwc_winograd_gpu() {
  static const TunableOp<Params> op("NhwcWinograd", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
