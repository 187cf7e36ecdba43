// GEMM for CPU kernels, in blocks of 32 rows by 32 columns: bfloat16 with sums in float, or int8 with sums in int32,
// which are exact. The type of the sums selects the elements. Uses AMX if the processor has it; else the dot products
// of AVX-512 (BF16, VNNI); else float vectors for bfloat16 and products of int16 for int8.
//
// Rows are stored as [block of depths][row][64 bytes], or in another layout of complete blocks, in units of 16 bits:
// one bfloat16 or two int8. For the weights see packed_weights.h. A convolution reads its rows (pixels) once per tap,
// each time from another first row.
#pragma once

#include <type_traits>

#include "common/cpu.h"
#include "common/packed_weights.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define SD_ORT_DOT_PRODUCTS
#endif
#if defined(__AVX512F__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define SD_ORT_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sd_ort {
namespace SD_ORT_ISA {

constexpr int64_t kBlockRows = 32;
constexpr int64_t kBlockColumns = 2 * kPanelColumns;
constexpr int64_t kFilterWidth = 3, kMaxTaps = kFilterWidth * kFilterWidth;

struct GemmBlock {
  const uint16_t* rows;     // element i of block b of row r is at b * block_stride + r * row_stride + i
  const uint16_t* weights;  // packed
  int64_t block_stride;
  int64_t row_stride;
  int64_t blocks;
  int64_t taps;
  int64_t first[kMaxTaps];           // first row of each tap
  const int32_t* offsets = nullptr;  // of int8: packed_offsets()
};

using Words = uint32_t __attribute__((vector_size(kLanes * 4)));

// kLanes floats rounded to bfloat16 in the upper halves of the lanes, as by bfloat16_bits().
inline Ints rounded(Floats x) {
  const Ints bits = (Ints)x;
  const Ints even = (bits + 0x7fff + (bits >> 16 & 1)) & static_cast<int32_t>(0xffff0000u);
  const Ints number = x == x;
  return (number & even) | (~number & 0x7fc00000);
}

inline void store_bfloat16(uint16_t* to, Floats x) {
  using Shorts = uint16_t __attribute__((vector_size(kLanes * 2)));
  const Shorts shorts = __builtin_convertvector((Words)rounded(x) >> 16, Shorts);
  memcpy(to, &shorts, sizeof(shorts));
}

// Rounds 32 elements of a row; zeros from `count` on.
inline void round_row(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < kBlockDepth; i += kLanes) {
    const int64_t left = count - i;
    store_bfloat16(to + i, left >= kLanes ? load(from + i) : load_some(from + i, left > 0 ? left : 0));
  }
}
inline void round_row(const BFloat* from, int64_t count, uint16_t* to) {
  if (count >= kBlockDepth) {
    memcpy(to, from, kBlockDepth * sizeof(uint16_t));
  } else {
    memset(to, 0, kBlockDepth * sizeof(uint16_t));
    if (count > 0) memcpy(to, from, count * sizeof(uint16_t));
  }
}

// Stores min(count, kLanes) elements.
inline void store_up_to(float* to, Floats x, int64_t count) {
  count >= kLanes ? store(to, x) : store_some(to, x, count);
}
inline void store_up_to(BFloat* to, Floats x, int64_t count) {
  if (count >= kLanes) return store_bfloat16(&to->bits, x);
  uint16_t bits[kLanes];
  store_bfloat16(bits, x);
  memcpy(to, bits, count * sizeof(uint16_t));
}

// Adds the products of the pairs of int16 of two vectors to the int32 of `sum`.
inline Ints add_pairs(Ints sum, Ints a, Ints b) {
#if defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Adds the products of a word of a row and one word a column: bfloat16 low and high, or int8 at even and odd bytes.
inline void multiply_words(Floats& sum, uint32_t row, Ints words) {
  const uint32_t low = row << 16, high = row & 0xffff0000u;
  float first, second;
  memcpy(&first, &low, 4);
  memcpy(&second, &high, 4);
  sum += splat(first) * (Floats)(words << 16);
  sum += splat(second) * (Floats)(words & static_cast<int32_t>(0xffff0000u));
}
inline Ints odd_bytes(Ints words) {  // of int16: the upper byte with its sign
  using Shorts = int16_t __attribute__((vector_size(kLanes * 4)));
  return (Ints)((Shorts)words >> 8);
}
inline void multiply_words(Ints& sum, uint32_t row, Ints words) {
  using Shorts = int16_t __attribute__((vector_size(kLanes * 4)));
  const Ints rows = static_cast<int32_t>(row) - Ints{};
  sum = add_pairs(sum, odd_bytes((Ints)((Shorts)rows << 8)), odd_bytes((Ints)((Shorts)words << 8)));
  sum = add_pairs(sum, odd_bytes(rows), odd_bytes(words));
}

inline Ints load(const int32_t* from) {
  Ints values;
  memcpy(&values, from, sizeof(values));
  return values;
}
inline void store(int32_t* to, Ints values) { memcpy(to, &values, sizeof(values)); }

// Computes sums[row * 32 + column] of `count` rows from `row` on and panels `panel` and `panel` + 1; the other rows of
// kRows (16 or 32) become anything. kAdd adds to the previous sums.
template <bool kAdd, class Sum>
void multiply_block_vectors(const GemmBlock& p, int64_t row, int64_t panel, Sum* sums, int64_t count) {
  using Sums = decltype(load(sums));
  const int64_t panel_size = p.taps * p.blocks * kBlockElements;
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t r = 0; r < count; r += 4) {
      Sums sum[4][kPanelColumns / kLanes] = {};
      const uint16_t* weights = p.weights + (panel + half) * panel_size;
      for (int64_t tap = 0; tap < p.taps; ++tap) {
        for (int64_t block = 0; block < p.blocks; ++block, weights += kBlockElements) {
          const uint16_t* rows = p.rows + block * p.block_stride + (row + r + p.first[tap]) * p.row_stride;
          for (int64_t pair = 0; pair < kBlockDepth / 2; ++pair) {
            for (int64_t v = 0; v < kPanelColumns / kLanes; ++v) {
              Ints words;
              memcpy(&words, weights + (pair * kPanelColumns + v * kLanes) * 2, sizeof(words));
              for (int64_t i = 0; i < 4; ++i) {
                uint32_t both;
                memcpy(&both, rows + i * p.row_stride + pair * 2, 4);
                multiply_words(sum[i][v], both, words);
              }
            }
          }
        }
      }
      for (int64_t i = 0; i < 4; ++i) {
        for (int64_t v = 0; v < kPanelColumns / kLanes; ++v) {
          Sum* to = sums + (r + i) * kBlockColumns + half * kPanelColumns + v * kLanes;
          store(to, kAdd ? load(to) + sum[i][v] : sum[i][v]);
        }
      }
    }
  }
}

#if defined(SD_ORT_AMX)

// Whether the processor has AMX for bfloat16 and int8 and Linux permits this process to use it (Intel, "Architecture
// Instruction Set Extensions Programming Reference", CPUID 7.0; Linux, arch_prctl(2): ARCH_REQ_XCOMP_PERM).
inline bool request_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1 & d >> 24 & d >> 25) == 0) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
inline bool has_amx() {
  static const bool runs = request_amx();
  return runs;
}

#define SD_ORT_AMX_TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8")))

// Eight tiles of 16 rows of 64 bytes.
SD_ORT_AMX_TARGET inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  __asm__ volatile("" ::"r"(&config) : "memory");  // GCC's intrinsic declares a read of only 8 bytes
  _tile_loadconfig(&config);
}
SD_ORT_AMX_TARGET inline void release_tiles() { _tile_release(); }

// GCC's intrinsics take tile numbers as literals.
#define SD_ORT_MULTIPLY_TILES(sum, row, column) \
  if constexpr (std::is_same_v<Sum, int32_t>) { \
    _tile_dpbssd(sum, row, column);             \
  } else {                                      \
    _tile_dpbf16ps(sum, row, column);           \
  }

template <bool kAdd, int64_t kRows, class Sum>
SD_ORT_AMX_TARGET void multiply_block_amx(const GemmBlock& p, int64_t row, int64_t panel, Sum* sums) {
  constexpr int64_t kStride = kBlockColumns * sizeof(Sum);
  constexpr bool kLower = kRows > 16;
  Sum* lower = sums + 16 * kBlockColumns;
  const int64_t panel_size = p.taps * p.blocks * kBlockElements;
  const int64_t bytes = p.row_stride * sizeof(uint16_t);
  const uint16_t* left = p.weights + panel * panel_size;
  if (kAdd) {
    _tile_loadd(0, sums, kStride);
    _tile_loadd(1, sums + kPanelColumns, kStride);
    if (kLower) _tile_loadd(2, lower, kStride);
    if (kLower) _tile_loadd(3, lower + kPanelColumns, kStride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const int64_t width =
      p.taps == kMaxTaps ? kFilterWidth : 1;  // adjacent taps read adjacent rows, which are in the L1 cache
  for (int64_t tap = 0; tap < p.taps; tap += width) {
    for (int64_t block = 0; block < p.blocks; ++block) {
      for (int64_t t = tap; t < tap + width; ++t) {
        const uint16_t* rows = p.rows + (row + p.first[t]) * p.row_stride + block * p.block_stride;
        const uint16_t* right = left + (t * p.blocks + block) * kBlockElements;
        _tile_loadd(4, rows, bytes);
        _tile_loadd(6, right, 64);
        _tile_loadd(7, right + panel_size, 64);
        if (kLower) _tile_loadd(5, rows + 16 * p.row_stride, bytes);
        SD_ORT_MULTIPLY_TILES(0, 4, 6)
        SD_ORT_MULTIPLY_TILES(1, 4, 7)
        if (kLower) {
          SD_ORT_MULTIPLY_TILES(2, 5, 6)
          SD_ORT_MULTIPLY_TILES(3, 5, 7)
        }
      }
    }
  }
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kPanelColumns, kStride);
  if (kLower) _tile_stored(2, lower, kStride);
  if (kLower) _tile_stored(3, lower + kPanelColumns, kStride);
}

#else

inline bool has_amx() { return false; }

#endif

#if defined(SD_ORT_DOT_PRODUCTS)

// Whether int8 rows are stored as x + 128, which VNNI multiplies by signed weights. The excess, 128 times the sum of a
// column's weights, is subtracted.
inline bool adds_128() {
  static const bool runs = !has_amx() && __builtin_cpu_supports("avx512vnni");
  return runs;
}

inline bool has_dot_products(float*) {
  static const bool runs = __builtin_cpu_supports("avx512bf16");
  return runs;
}
inline bool has_dot_products(int32_t*) { return adds_128(); }

// As multiply_block_vectors(), by the instructions that add the products of a word of 32 bits to each sum.
template <bool kAdd, class Sum>
__attribute__((target("avx512vnni,avx512bf16"))) void multiply_block_dots(const GemmBlock& p, int64_t row,
                                                                          int64_t panel, Sum* sums, int64_t count) {
  constexpr bool kInt8 = std::is_same_v<Sum, int32_t>;
  constexpr int64_t kHeight = 8;  // rows at once: 16 sums of 16 columns stay in registers
  using Sums = decltype(load(sums));
  const int64_t panel_size = p.taps * p.blocks * kBlockElements;
  for (int64_t r = 0; r < count; r += kHeight) {
    Sum* to = sums + r * kBlockColumns;
    Sums sum[kHeight][2];
    for (int64_t i = 0; i < kHeight; ++i) {
      for (int64_t half = 0; half < 2; ++half) {
        sum[i][half] = kAdd ? load(to + i * kBlockColumns + half * kPanelColumns) : Sums{};
        if constexpr (kInt8) sum[i][half] -= load(p.offsets + (panel + half) * kPanelColumns);
      }
    }
    const uint16_t* weights = p.weights + panel * panel_size;
    for (int64_t tap = 0; tap < p.taps; ++tap) {
      const uint16_t* rows = p.rows + (row + r + p.first[tap]) * p.row_stride;
      for (int64_t block = 0; block < p.blocks; ++block, rows += p.block_stride) {
        for (int64_t word = 0; word < kBlockDepth / 2; ++word, weights += 2 * kPanelColumns) {
          const __m512i a = _mm512_loadu_si512(weights), b = _mm512_loadu_si512(weights + panel_size);
          for (int64_t i = 0; i < kHeight; ++i) {
            int32_t pair;
            memcpy(&pair, rows + i * p.row_stride + word * 2, 4);
            const __m512i x = _mm512_set1_epi32(pair);
            if constexpr (kInt8) {
              sum[i][0] = (Sums)_mm512_dpbusd_epi32((__m512i)sum[i][0], x, a);
              sum[i][1] = (Sums)_mm512_dpbusd_epi32((__m512i)sum[i][1], x, b);
            } else {
              sum[i][0] = (Sums)_mm512_dpbf16_ps((__m512)sum[i][0], (__m512bh)x, (__m512bh)a);
              sum[i][1] = (Sums)_mm512_dpbf16_ps((__m512)sum[i][1], (__m512bh)x, (__m512bh)b);
            }
          }
        }
      }
    }
    for (int64_t i = 0; i < kHeight; ++i) {
      store(to + i * kBlockColumns, sum[i][0]);
      store(to + i * kBlockColumns + kPanelColumns, sum[i][1]);
    }
  }
}

#else

inline bool adds_128() { return false; }

#endif

// Byte of an int8 zero in packed rows.
inline uint8_t packed_zero() { return adds_128() ? 0x80 : 0; }

// Packs 64 elements of an int8 row. Weights are zero from `count` on, so that anything may be there.
inline void pack_bytes(const int8_t* from, int64_t count, uint16_t* to) {
  constexpr int64_t kBytes = 2 * kBlockDepth;
  uint64_t eights[kBytes / 8] = {};
  memcpy(eights, from, count < kBytes ? count : kBytes);
  const uint64_t flip = adds_128() ? 0x8080808080808080u : 0;
  for (uint64_t& eight : eights) eight ^= flip;
  memcpy(to, eights, kBytes);
}

// Configures AMX tiles of this thread during its lifetime.
class TileScope {
 public:
#if defined(SD_ORT_AMX)
  TileScope() {
    if (has_amx()) configure_tiles();
  }
  ~TileScope() {
    if (has_amx()) release_tiles();
  }
#else
  TileScope() {}
  ~TileScope() {}
#endif
};

template <bool kAdd = false, int64_t kRows = kBlockRows, class Sum>
void multiply_block(const GemmBlock& p, int64_t row, int64_t panel, Sum* sums, int64_t count = kRows) {
#if defined(SD_ORT_AMX)
  if (has_amx()) {
    return count <= 16 ? multiply_block_amx<kAdd, 16>(p, row, panel, sums)
                       : multiply_block_amx<kAdd, kRows>(p, row, panel, sums);
  }
#endif
#if defined(SD_ORT_DOT_PRODUCTS)
  if (has_dot_products(sums)) return multiply_block_dots<kAdd>(p, row, panel, sums, count);
#endif
  multiply_block_vectors<kAdd>(p, row, panel, sums, count);
}

#if defined(__AVX512F__)
inline Ints even_quarters(Ints x, Ints y) {
  return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
inline Ints odd_quarters(Ints x, Ints y) {
  return __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#endif

// Transposes 16 x 16 elements of 32 bits: to[i * to_stride + j] = from[j * from_stride + i].
template <class T>
void transpose_16(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  static_assert(sizeof(T) == 4);
#if defined(__AVX512F__)
  Ints a[16], b[16];
  for (int i = 0; i < 16; ++i) memcpy(&a[i], from + i * from_stride, sizeof(Ints));
  for (int i = 0; i < 16; i += 2) {
    b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + k]: element k of each quarter of vectors i to i + 3
    for (int k = 0; k < 2; ++k) {
      const Ints x = b[i + k], y = b[i + k + 2];
      a[i + 2 * k] = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      a[i + 2 * k + 1] = __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  }
  for (int k = 0; k < 4; ++k) {
    const Ints low02 = even_quarters(a[k], a[k + 4]), low13 = odd_quarters(a[k], a[k + 4]);
    const Ints high02 = even_quarters(a[k + 8], a[k + 12]), high13 = odd_quarters(a[k + 8], a[k + 12]);
    const Ints columns[4] = {even_quarters(low02, high02), even_quarters(low13, high13), odd_quarters(low02, high02),
                             odd_quarters(low13, high13)};
    for (int i = 0; i < 4; ++i) memcpy(to + (k + 4 * i) * to_stride, &columns[i], sizeof(Ints));
  }
#else
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t j = 0; j < 16; ++j) to[i * to_stride + j] = from[j * from_stride + i];
  }
#endif
}

// Divides blocks of rows and pairs of panels into tasks: enough for all threads, with rows that fit the cache.
struct Tasks {
  static constexpr int64_t kRowBlocks = 16, kMinTasks = 32;
  int64_t row_blocks, pairs, chunks, groups, pairs_per_task;

  Tasks(int64_t rows, int64_t panels) : row_blocks(ceil_div(rows, kBlockRows)), pairs(panels / 2) {
    chunks = ceil_div(row_blocks, kRowBlocks);
    const int64_t group_target = chunks > 0 ? ceil_div(kMinTasks, chunks) : 1;
    pairs_per_task = group_target > 0 && pairs > group_target ? ceil_div(pairs, group_target) : 1;
    if (chunks >= kMinTasks) pairs_per_task = pairs > 0 ? pairs : 1;
    groups = ceil_div(pairs, pairs_per_task);
  }
  int64_t count() const { return chunks * groups; }

  // Calls body(row block, panel) for all blocks of a task. Panels are the outer loop, or rows with `by_rows`, for
  // results whose rows each fit one page.
  template <class F>
  void run(int64_t task, bool by_rows, F&& body) const {
    const int64_t chunk = task % chunks, group = task / chunks;
    const int64_t end = (group + 1) * pairs_per_task < pairs ? (group + 1) * pairs_per_task : pairs;
    const int64_t last = (chunk + 1) * kRowBlocks < row_blocks ? (chunk + 1) * kRowBlocks : row_blocks;
    const int64_t first = chunk * kRowBlocks, begin = group * pairs_per_task;
    for (int64_t i = 0; i < (last - first) * (end - begin); ++i) {
      const int64_t block = by_rows ? i / (end - begin) : i % (last - first);
      const int64_t pair = by_rows ? i % (end - begin) : i / (last - first);
      body(first + block, 2 * (begin + pair));
    }
  }
};

}  // namespace SD_ORT_ISA
}  // namespace sd_ort
