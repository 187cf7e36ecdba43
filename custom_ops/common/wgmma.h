// Warpgroup matrix instructions of NVIDIA GPUs (sm_90a): 128 threads multiply 64 rows by up to 256 columns,
// asynchronously, with operands in shared memory or, for the rows, in registers. Device code. Accumulators have the
// layout of mma.h: warp w has rows 16 w to 16 w + 15, with 16 columns per Accumulator.
//
// Tiles in shared memory are panels of 64 columns. A row has 128 bytes in eight 16-byte pieces; piece p of row r is
// stored at position p ^ (r % 8) ("128-byte swizzle"). Eight rows (1024 bytes) are an atom, to which panels are
// aligned. Sources: NVIDIA PTX ISA, "Asynchronous warpgroup level matrix instructions": matrix descriptor, strides and
// swizzling modes.
#pragma once

#include "common/mma.h"

#if SD_ORT_HAS_WARPGROUPS
namespace sd_ort {
namespace wgmma {

constexpr int kRows = 64;
constexpr int kThreads = 128;
constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kAtomBytes = 1024;

// Byte offset in a panel of 8 columns of `row`, starting at column 8 * piece.
__host__ __device__ constexpr uint32_t piece_offset(uint32_t row, uint32_t piece) {
  return row * kRowBytes + ((piece ^ (row % 8)) * 16);
}

// Descriptor of a matrix in shared memory: byte address of its first element and two strides in bytes. `stride` leads
// to the next eight rows; for N-major matrices (V, with the depth along columns) `leading` leads to the next panel. Q
// and K are K-major, with the depth along rows.
__host__ __device__ constexpr uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1;
  return (address & 0x3ffffu) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | kSwizzle128 << 62;
}

// As above for a K-major matrix whose rows have 64 bytes, with piece p of row r at position p ^ (r / 2 % 4) ("64-byte
// swizzle"). Eight rows (512 bytes) are an atom, and follow one another.
constexpr int kHalfRowBytes = 64, kHalfAtomBytes = 512;
__host__ __device__ constexpr uint32_t half_piece_offset(uint32_t row, uint32_t piece) {
  return row * kHalfRowBytes + ((piece ^ (row / 2 % 4)) * 16);
}
__host__ __device__ constexpr uint64_t half_row_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle64 = 2, kLeading = 16;
  return (address & 0x3ffffu) >> 4 | (kLeading >> 4) << 16 | static_cast<uint64_t>(kHalfAtomBytes >> 4) << 32 |
         kSwizzle64 << 62;
}

// The same matrix `bytes` further on: a descriptor's low half has the address, which does not overflow. Between two
// multiplications one addition is cheaper than another descriptor().
__host__ __device__ constexpr uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor >> 32 << 32) | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// Address in shared memory for descriptors.
__device__ inline uint32_t address_of(const void* lds) {
#if defined(SD_ORT_EMULATED)
  return static_cast<uint32_t>(static_cast<const char*>(lds) - emulator::dynamic_lds());
#elif SD_ORT_CUDA_CODE
  return static_cast<uint32_t>(__cvta_generic_to_shared(lds));
#else
  return 0;
#endif
}

#if defined(SD_ORT_EMULATED)
}  // namespace wgmma
}  // namespace sd_ort
#include "wgmma_instructions.h"  // tests/gpu_emulator: the same functions as below, in software
namespace sd_ort {
namespace wgmma {
#else
// Required before the first multiplication, and after writes to registers that one uses.
__device__ inline void fence() {
#if defined(SD_ORT_WGMMA)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Makes stores of this thread to shared memory visible to multiplications after the next barrier.
__device__ inline void fence_stores() {
#if defined(SD_ORT_WGMMA)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ inline void commit() {
#if defined(SD_ORT_WGMMA)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until all multiplications except the last kPending committed groups have finished.
template <int kPending>
__device__ inline void wait() {
#if defined(SD_ORT_WGMMA)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// d[64 x 16 kTiles] = a[64 x 16] b[16 kTiles x 16]^T, added to d when `add`; both matrices K-major.
template <class T, int kTiles>
__device__ inline void multiply(mma::Accumulator (&d)[kTiles], uint64_t a, uint64_t b, bool add);

// d[64 x 16 kTiles] += a[64 x 16] b[16 x 16 kTiles]: a in registers, b N-major.
template <class T, int kTiles>
__device__ inline void multiply_add(mma::Accumulator (&d)[kTiles], const mma::Operand<T>& a, uint64_t b);

// d[64 x 128] = a[64 x 16] b[16 x 128], added to d when `add`: a K-major and b N-major, both in shared memory.
template <class T>
__device__ inline void multiply_n_major(mma::Accumulator (&d)[8], uint64_t a, uint64_t b, bool add);

// Required between a wait and uses of the accumulators: for the compiler a multiplication ends when it is issued.
template <int kTiles>
__device__ inline void settle(mma::Accumulator (&d)[kTiles]) {
#if defined(SD_ORT_WGMMA)
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    asm volatile(""
                 : "+f"(d[t].x[0]), "+f"(d[t].x[1]), "+f"(d[t].x[2]), "+f"(d[t].x[3]), "+f"(d[t].x[4]), "+f"(d[t].x[5]),
                   "+f"(d[t].x[6]), "+f"(d[t].x[7])::"memory");
  }
#endif
}

// Sets the register count of the warpgroup's threads; one warpgroup releases registers that others acquire. Such a
// kernel has __launch_bounds__ with both numbers.
template <int kRegisters>
__device__ inline void give_registers_but() {
#if defined(SD_ORT_WGMMA)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ inline void take_registers() {
#if defined(SD_ORT_WGMMA)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// The instructions by size, with explicit registers: d, then the operands.
#if defined(SD_ORT_WGMMA)
#define SD_ORT_D8(t)                                                                                    \
  "+f"(d[t].x[0]), "+f"(d[t].x[1]), "+f"(d[t].x[2]), "+f"(d[t].x[3]), "+f"(d[t].x[4]), "+f"(d[t].x[5]), \
      "+f"(d[t].x[6]), "+f"(d[t].x[7])
#define SD_ORT_D24 SD_ORT_D8(0), SD_ORT_D8(1), SD_ORT_D8(2)
#define SD_ORT_D32 SD_ORT_D24, SD_ORT_D8(3)
#define SD_ORT_D40 SD_ORT_D32, SD_ORT_D8(4)
#define SD_ORT_D64 SD_ORT_D40, SD_ORT_D8(5), SD_ORT_D8(6), SD_ORT_D8(7)
#define SD_ORT_D80 SD_ORT_D64, SD_ORT_D8(8), SD_ORT_D8(9)
#define SD_ORT_N24                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23"
#define SD_ORT_N32                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SD_ORT_N40                                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39"
#define SD_ORT_N64                                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SD_ORT_N80                                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define SD_ORT_WGMMA_SHARED(T, name, columns, registers, a_at, b_at, add_at)                                    \
  template <>                                                                                                   \
  __device__ inline void multiply<T, columns / 16>(mma::Accumulator(&d)[columns / 16], uint64_t a, uint64_t b,  \
                                                   bool add) {                                                  \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_at                                               \
                 ", 0;\n"                                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name " {" SD_ORT_N##registers \
                 "}, %" #a_at ", %" #b_at ", add, 1, 1, 0, 0;\n}\n"                                             \
                 : SD_ORT_D##registers                                                                          \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                 \
  }
#define SD_ORT_WGMMA_REGISTERS(T, name, columns, registers, a0, a1, a2, a3, b_at)                                    \
  template <>                                                                                                        \
  __device__ inline void multiply_add<T, columns / 16>(mma::Accumulator(&d)[columns / 16], const mma::Operand<T>& a, \
                                                       uint64_t b) {                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name " {" SD_ORT_N##registers      \
                 "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b_at ", 1, 1, 1, 1;\n"                               \
                 : SD_ORT_D##registers                                                                               \
                 : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "l"(b));                                      \
  }
#define SD_ORT_WGMMA_N_MAJOR(T, name)                                                                     \
  template <>                                                                                             \
  __device__ inline void multiply_n_major<T>(mma::Accumulator(&d)[8], uint64_t a, uint64_t b, bool add) { \
    asm volatile(                                                                                         \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {" SD_ORT_N64                      \
        "}, %64, %65, add, 1, 1, 0, 1;\n}\n"                                                              \
        : SD_ORT_D64                                                                                      \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                    \
  }
#define SD_ORT_WGMMA_TYPE(T, name)                            \
  SD_ORT_WGMMA_N_MAJOR(T, name)                               \
  SD_ORT_WGMMA_SHARED(T, name, 64, 32, 32, 33, 34)            \
  SD_ORT_WGMMA_SHARED(T, name, 80, 40, 40, 41, 42)            \
  SD_ORT_WGMMA_SHARED(T, name, 128, 64, 64, 65, 66)           \
  SD_ORT_WGMMA_REGISTERS(T, name, 48, 24, 24, 25, 26, 27, 28) \
  SD_ORT_WGMMA_REGISTERS(T, name, 64, 32, 32, 33, 34, 35, 36) \
  SD_ORT_WGMMA_REGISTERS(T, name, 80, 40, 40, 41, 42, 43, 44) \
  SD_ORT_WGMMA_REGISTERS(T, name, 128, 64, 64, 65, 66, 67, 68)
SD_ORT_WGMMA_TYPE(half_t, "f16")
SD_ORT_WGMMA_TYPE(bf16_t, "bf16")
#endif
#endif

// Host: whether the kernels were compiled for the current device.
inline bool are_compiled() {
#if defined(SD_ORT_EMULATED) || defined(SD_ORT_SM_90A)
  return compute_capability() == 9;
#else
  return false;
#endif
}

}  // namespace wgmma
}  // namespace sd_ort
#endif
