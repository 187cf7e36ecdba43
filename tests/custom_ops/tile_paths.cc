// The kernels of one operator in int8 for tests/custom_ops/test_tile_paths.py, on a path of its choice: SOURCE is the
// operator's cpu.cc, and WITH_AMX executes the tile instructions in software, on any processor.
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <cpuid.h>
#include <immintrin.h>
#include <unistd.h>

#define __builtin_cpu_supports(feature) 0  // no VNNI
#if defined(WITH_AMX)
#undef __get_cpuid_count
#undef _tile_loadconfig
#define _tile_loadconfig software_tile_loadconfig
#undef _tile_release
#define _tile_release software_tile_release
#undef _tile_zero
#define _tile_zero software_tile_zero
#undef _tile_loadd
#define _tile_loadd software_tile_loadd
#undef _tile_stored
#define _tile_stored software_tile_stored
#undef _tile_dpbssd
#define _tile_dpbssd software_tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_dpbf16ps software_tile_dpbf16ps

namespace {

constexpr int kRows = 16, kBytes = 64;
thread_local uint8_t tiles[8][kRows][kBytes];
thread_local bool configured = false;

struct Configuration {  // of palette 1 (Intel, "Architecture Instruction Set Extensions Programming Reference",
                        // LDTILECFG)
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

bool software_cpuid(int, int, unsigned*, unsigned*, unsigned*, unsigned* d) {
  *d = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  return true;
}
long software_syscall(long, long, long) { return 0; }

void _tile_loadconfig(const void* from) {
  Configuration config;
  memcpy(&config, from, sizeof(config));
  configured = config.palette == 1;
  for (int i = 0; i < 8; ++i) configured = configured && config.bytes[i] == kBytes && config.rows[i] == kRows;
}
void _tile_release() { configured = false; }
void check() {
  if (!configured) __builtin_trap();  // as the processor does
}
void _tile_zero(int tile) {
  check();
  memset(tiles[tile], 0, sizeof(tiles[tile]));
}
void _tile_loadd(int tile, const void* from, int64_t stride) {
  check();
  for (int row = 0; row < kRows; ++row) memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, kBytes);
}
void _tile_stored(int tile, void* to, int64_t stride) {
  check();
  for (int row = 0; row < kRows; ++row) memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], kBytes);
}
// sums[m][n] += a[m][4 k + i] * b[k][4 n + i]
void _tile_dpbssd(int sums, int a, int b) {
  check();
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < 16; ++n) {
      int32_t sum;
      memcpy(&sum, tiles[sums][m] + 4 * n, 4);
      for (int i = 0; i < kBytes; ++i) {
        sum += static_cast<int8_t>(tiles[a][m][i]) * static_cast<int8_t>(tiles[b][i / 4][4 * n + i % 4]);
      }
      memcpy(tiles[sums][m] + 4 * n, &sum, 4);
    }
  }
}
[[maybe_unused]] void _tile_dpbf16ps(int, int, int) { __builtin_trap(); }

}  // namespace

#define __get_cpuid_count software_cpuid
#define syscall software_syscall
#endif
#endif

#include SOURCE

namespace {

void run_serially(void*, sd_ort::Parallel::Body body, size_t count, void* context) {
  for (size_t i = 0; i < count; ++i) body(context, i);
}

template <class Params>
void run(void (*kernel)(const Params&, const sd_ort::Parallel&), const void* call, const sd_ort::WeightLayout& weight) {
  const sd_ort::Parallel parallel(run_serially, nullptr);
  sd_ort::PackedWeights packed;
  Params params = *static_cast<const Params*>(call);
  params.packed = packed.get(weight, parallel);
  kernel(params, parallel);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT bool has_amx() { return sd_ort::SD_ORT_ISA::has_amx(); }

EXPORT void run(const void* call, const void* data, int64_t depth, int64_t taps, int64_t columns, bool halves) {
  run(sd_ort::SD_ORT_ISA::KERNEL, call, {data, sd_ort::DType::kInt8, depth, taps, columns, taps, depth * taps, halves});
}
