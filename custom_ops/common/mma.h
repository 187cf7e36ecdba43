// Matrix instructions of AMD and NVIDIA GPUs under one set of names: D[16 x 16] += A[16 x 16] B[16 x 16]^T with fp16 or
// bf16 operands and fp32 accumulation, one wave at a time. Device code.
//
// An element can also be a pair of float8 numbers, where SD_ORT_MMA_FLOAT8 is defined: a step then multiplies 32
// numbers of each row, with v_mfma_f32_16x16x32_fp8_fp8, two v_wmma_f32_16x16x16_fp8_fp8 or two mma.sync.m16n8k32.e4m3.
//
//   CDNA (gfx90a, gfx942)     v_mfma_f32_16x16x16_{f16,bf16_1k}, wave64; gfx908 v_mfma_f32_16x16x8_bf16 twice
//   RDNA3 (gfx11)             v_wmma_f32_16x16x16_{f16,bf16}, wave32, both halves of a wave hold the same operand
//   RDNA4 (gfx12)             v_wmma_f32_16x16x16_{f16,bf16}, wave32, operands divided over the wave
//   RDNA2 (gfx103x)           64 v_dot2c_f32_f16, or 128 v_fmac_f32 for bf16, wave32: there are no matrix instructions
//   NVIDIA (sm_80 and newer)  two mma.sync.m16n8k16, wave32
//
// Both operands are stored with the contraction ("depth") innermost, so D[r][c] = sum over d of A[r][d] * B[c][d].
// On AMD the instruction runs transposed, D^T = B A^T, with the operands exchanged. A lane then holds one row of D in
// the layout of the next A operand (RDNA2 and RDNA3 after one exchange), so chained GEMMs such as softmax(Q K^T) V of
// attention stay in registers, as they do on NVIDIA without the transposition.
//
// On RDNA2 a lane holds a complete row of each operand, and computes 8 columns of its row of D. DPP's row_share:n reads
// lane n of the lane's own 16, as a free operand of the instruction. The second half of the wave holds rows 8-15 before
// rows 0-7, so that the same n is column n in the first half and column n + 8 in the second.
//
// The constexpr functions below (operand_row, operand_depth, accumulator_row, accumulator_column) define which element
// a lane holds; loads and stores use them. Sources: AMD's ISA documents "AMD Instinct MI300", "RDNA3" and "RDNA4"
// (sections on MFMA and WMMA) as tabulated by ROCm's amd_matrix_instruction_calculator; NVIDIA's PTX ISA, "Matrix
// fragments for mma.m16n8k16". The depth index of a register is arbitrary if both operands agree; the documents' order
// differs on RDNA4 (0-3, 8-11 | 4-7, 12-15). tests/gpu_emulator runs these functions against instructions written from
// those tables.
#pragma once

#include <type_traits>

#include "common/gpu.h"

namespace sd_ort {
namespace mma {

constexpr int kTile = 16;  // rows, columns and depth of one step
constexpr int kWave = SD_ORT_WAVE_SIZE;

#if defined(SD_ORT_MMA_RDNA2) || defined(SD_ORT_MMA_RDNA3)
constexpr bool kWideOperands = true;  // an operand takes twice the registers of its data
#else
constexpr bool kWideOperands = false;
#endif

// Whether a product converts its operands, which takes registers.
#if defined(SD_ORT_MMA_RDNA2)
template <class T>
constexpr bool kConvertsOperands = !std::is_same_v<T, half_t>;
#else
template <class T>
constexpr bool kConvertsOperands = false;
#endif

#if defined(SD_ORT_MMA_CDNA)
constexpr int kOperandRegisters = 2;  // 4 elements per lane
constexpr int kAccumulatorSize = 4;
#elif defined(SD_ORT_MMA_RDNA2) || defined(SD_ORT_MMA_RDNA3)
constexpr int kOperandRegisters = 8;  // 16 elements: a complete row in both halves of the wave
constexpr int kAccumulatorSize = 8;
#else
constexpr int kOperandRegisters = 4;  // 8 elements
constexpr int kAccumulatorSize = 8;
#endif
constexpr int kOperandSize = 2 * kOperandRegisters;

// N registers, as clang vector types if available: clang keeps these together through loads, stores and instructions.
template <class R, int N>
struct Registers {
#if defined(__clang__)
  typedef R type __attribute__((ext_vector_type(N)));
#else
  typedef R type[N];
#endif
};

// Two float8 numbers (common/float8.h), adjacent in the depth, as one element of an operand.
struct float8x2_t {
  uint16_t bits;
};

// Whether the target multiplies operands of T.
#if defined(SD_ORT_MMA_FLOAT8)
template <class T>
constexpr bool kMultiplies = true;
#else
template <class T>
constexpr bool kMultiplies = !std::is_same_v<T, float8x2_t>;
#endif

// What the product of two float8 numbers is multiplied by: gfx942 reads them in AMD's FNUZ format, in which the same
// bits mean half of the value.
#if defined(__gfx942__)
constexpr float kFloat8ProductFactor = 4.f;
#else
constexpr float kFloat8ProductFactor = 1.f;
#endif

// A 16 x 16 operand of T (half_t, bf16_t or float8x2_t), two elements per register, the even one in the low half.
template <class T>
struct Operand {
  typename Registers<uint32_t, kOperandRegisters>::type r;
};

struct Accumulator {
#if defined(SD_ORT_MMA_RDNA2)
  float x[kAccumulatorSize];  // registers of their own to the instructions
#else
  Registers<float, kAccumulatorSize>::type x;
#endif
};

// ---- which element of a tile a lane holds -----------------------------------------------------------------------

#if defined(SD_ORT_MMA_NVIDIA)
constexpr int kRowsPerLane = 2;  // accumulator rows in one lane
__host__ __device__ constexpr int operand_row(int lane, int element) { return lane / 4 + 8 * (element / 2 % 2); }
__host__ __device__ constexpr int operand_depth(int lane, int element) {
  return lane % 4 * 2 + element % 2 + 8 * (element / 4);
}
__host__ __device__ constexpr int accumulator_row(int lane, int element) { return lane / 4 + 8 * (element / 2 % 2); }
__host__ __device__ constexpr int accumulator_column(int lane, int element) {
  return lane % 4 * 2 + element % 2 + 8 * (element / 4);
}
// Index of the row of an accumulator element among the kRowsPerLane rows of the lane.
__host__ __device__ constexpr int row_slot(int element) { return element / 2 % 2; }
#else
constexpr int kRowsPerLane = 1;
#if defined(SD_ORT_MMA_RDNA2)
__host__ __device__ constexpr int lane_row(int lane) { return lane % 16 ^ lane / 16 * 8; }
constexpr int kPartner = 24;  // lane ^ kPartner holds another part of the same row
#else
__host__ __device__ constexpr int lane_row(int lane) { return lane % 16; }
constexpr int kPartner = 16;
#endif
__host__ __device__ constexpr int operand_row(int lane, int) { return lane_row(lane); }
__host__ __device__ constexpr int accumulator_row(int lane, int) { return lane_row(lane); }
__host__ __device__ constexpr int row_slot(int) { return 0; }
#if defined(SD_ORT_MMA_CDNA)
__host__ __device__ constexpr int operand_depth(int lane, int element) { return lane / 16 * 4 + element; }
__host__ __device__ constexpr int accumulator_column(int lane, int element) { return lane / 16 * 4 + element; }
#elif defined(SD_ORT_MMA_RDNA2)
__host__ __device__ constexpr int operand_depth(int, int element) { return element; }
__host__ __device__ constexpr int accumulator_column(int lane, int element) { return lane / 16 * 8 + element; }
#elif defined(SD_ORT_MMA_RDNA3)
__host__ __device__ constexpr int operand_depth(int, int element) { return element; }
__host__ __device__ constexpr int accumulator_column(int lane, int element) { return 2 * element + lane / 16; }
#else
__host__ __device__ constexpr int operand_depth(int lane, int element) { return lane / 16 * 8 + element; }
__host__ __device__ constexpr int accumulator_column(int lane, int element) { return lane / 16 * 8 + element; }
#endif
#endif

// Row of the accumulator elements whose row_slot is `slot`.
__host__ __device__ constexpr int slot_row(int lane, int slot) {
  return accumulator_row(lane, 2 * slot % kAccumulatorSize);
}

// Padding in elements of operand tile rows in LDS, which avoids bank conflicts of a wave's loads (16-byte loads: rows
// an odd multiple of 16 bytes apart; 8-byte loads on CDNA: an odd multiple of 8 bytes).
#if defined(SD_ORT_MMA_CDNA)
constexpr int kPadding = 4;
#else
constexpr int kPadding = 8;
#endif

// Scheduling barrier: keeps AMD's compiler from loading all operands of an unrolled loop at once, which exceeds the
// registers.
__device__ inline void schedule_barrier() {
#if SD_ORT_HIP_CODE
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// Forces the accumulators to be computed here: RDNA's compiler would otherwise delay the multiplications until their
// results are used, with all operands in registers.
__device__ inline void settle(Accumulator& accumulator) {
#if SD_ORT_HIP_CODE && defined(SD_ORT_MMA_RDNA2)
#pragma unroll
  for (int i = 0; i < kAccumulatorSize; ++i) asm volatile("" : "+v"(accumulator.x[i]));
#elif SD_ORT_HIP_CODE && !defined(SD_ORT_MMA_CDNA)
  asm volatile("" : "+v"(accumulator.x));
#endif
}

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWave; }

// ---- two numbers to one register --------------------------------------------------------------------------------

template <class T>
__device__ inline uint32_t pack(float low, float high) {
#if SD_ORT_CUDA_CODE
  uint32_t packed;
  if constexpr (std::is_same_v<T, half_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
#elif SD_ORT_HIP
  if constexpr (std::is_same_v<T, half_t>) {
    const half_t pair[2] = {static_cast<half_t>(low), static_cast<half_t>(high)};
    uint32_t packed;
    memcpy(&packed, pair, sizeof(packed));
    return packed;
  } else {
    // To nearest even, without the NaN handling of from_float(): arithmetic produces only the NaN 0x7fc00000.
    const uint32_t low_bits = __float_as_uint(low), high_bits = __float_as_uint(high);
    uint32_t below_half = 0x7fffu;
    launder(below_half);  // in a vector register, since callers have few scalar ones
    const uint32_t low_rounded = low_bits + below_half + (low_bits >> 16 & 1u);
    const uint32_t high_rounded = high_bits + below_half + (high_bits >> 16 & 1u);
    return low_rounded >> 16 | (high_rounded & 0xffff0000u);
  }
#else
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  uint32_t packed;
  memcpy(&packed, pair, sizeof(packed));
  return packed;
#endif
}

// ---- the instructions -------------------------------------------------------------------------------------------

#if defined(SD_ORT_EMULATED)
}  // namespace mma
}  // namespace sd_ort
#include "mma_instructions.h"  // tests/gpu_emulator: the same functions as below, in software
namespace sd_ort {
namespace mma {
#elif defined(SD_ORT_MMA_NVIDIA)
#if SD_ORT_CUDA_CODE
template <class T>
__device__ inline void multiply_add_8_columns(float* d, const Registers<uint32_t, 4>::type& a, uint32_t b0,
                                              uint32_t b1) {
  if constexpr (std::is_same_v<T, half_t>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, float8x2_t>) {
#if defined(SD_ORT_MMA_FLOAT8)
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
#endif

// accumulator += a b^T
template <class T>
__device__ inline void multiply_add(Accumulator& accumulator, const Operand<T>& a, const Operand<T>& b) {
#if SD_ORT_CUDA_CODE
  multiply_add_8_columns<T>(accumulator.x, a.r, b.r[0], b.r[2]);
  multiply_add_8_columns<T>(accumulator.x + 4, a.r, b.r[1], b.r[3]);
#endif
}
#else
#if defined(SD_ORT_MMA_RDNA2)
#if defined(__GFX11__)
#define SD_ORT_DOT2 "v_dot2acc_f32_f16_dpp"
#else
#define SD_ORT_DOT2 "v_dot2c_f32_f16_dpp"
#endif
// Instructions that add products of the lane's operand `row` and `column` of lane n of its 16 to register n of a sum.
#define SD_ORT_COLUMN(instruction, n, column, row) \
  instruction " %" n ", " column ", " row " row_share:" n " row_mask:0xf bank_mask:0xf\n"
#define SD_ORT_COLUMNS(instruction, column, row) \
  SD_ORT_COLUMN(instruction, "0", column, row)   \
  SD_ORT_COLUMN(instruction, "1", column, row)   \
  SD_ORT_COLUMN(instruction, "2", column, row)   \
  SD_ORT_COLUMN(instruction, "3", column, row)   \
  SD_ORT_COLUMN(instruction, "4", column, row)   \
  SD_ORT_COLUMN(instruction, "5", column, row)   \
  SD_ORT_COLUMN(instruction, "6", column, row)   \
  SD_ORT_COLUMN(instruction, "7", column, row)
#define SD_ORT_SUMS \
  "+&v"(d[0]), "+&v"(d[1]), "+&v"(d[2]), "+&v"(d[3]), "+&v"(d[4]), "+&v"(d[5]), "+&v"(d[6]), "+&v"(d[7])

// accumulator += a b^T. In assembly: clang 19 makes each broadcast an instruction of its own, which halves the speed.
template <class T>
__device__ inline void multiply_add(Accumulator& accumulator, const Operand<T>& a, const Operand<T>& b) {
#if SD_ORT_HIP_CODE
  auto& d = accumulator.x;
#pragma unroll
  for (int i = 0; i < kOperandRegisters; ++i) {
    const uint32_t row = a.r[i], column = b.r[i];
    if constexpr (std::is_same_v<T, half_t>) {
      asm(SD_ORT_COLUMNS(SD_ORT_DOT2, "%8", "%9") : SD_ORT_SUMS : "v"(column), "v"(row));
    } else {  // an element is the high half of a float
      asm(SD_ORT_COLUMNS("v_fmac_f32_dpp", "%8", "%9") SD_ORT_COLUMNS("v_fmac_f32_dpp", "%10", "%11")
          : SD_ORT_SUMS
          : "v"(column << 16), "v"(row << 16), "v"(column & 0xffff0000u), "v"(row & 0xffff0000u));
    }
  }
#endif
}
#undef SD_ORT_SUMS
#undef SD_ORT_COLUMNS
#undef SD_ORT_COLUMN
#undef SD_ORT_DOT2
#else
typedef _Float16 HalfOperand __attribute__((ext_vector_type(kOperandSize)));
typedef short ShortOperand __attribute__((ext_vector_type(kOperandSize)));

#if defined(SD_ORT_MMA_FLOAT8)
__device__ inline void multiply_add(Accumulator& accumulator, const Operand<float8x2_t>& a,
                                    const Operand<float8x2_t>& b) {
  auto& d = accumulator.x;
#if defined(SD_ORT_MMA_CDNA)
  d = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, b.r), __builtin_bit_cast(long, a.r), d, 0, 0,
                                                 0);
#else  // two halves of the depth: a lane's registers are the same in both operands
  typedef int HalfDepth __attribute__((ext_vector_type(2)));
#pragma unroll
  for (int i = 0; i < kOperandRegisters; i += 2) {
    const HalfDepth left{static_cast<int>(b.r[i]), static_cast<int>(b.r[i + 1])};
    const HalfDepth right{static_cast<int>(a.r[i]), static_cast<int>(a.r[i + 1])};
    d = __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(left, right, d);
  }
#endif
}
#endif

template <class T>
__device__ inline void multiply_add(Accumulator& accumulator, const Operand<T>& a, const Operand<T>& b) {
  constexpr bool kHalf = std::is_same_v<T, half_t>;
  auto& d = accumulator.x;
#if defined(SD_ORT_MMA_CDNA)
  if constexpr (kHalf) {
    d = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(HalfOperand, b.r),
                                              __builtin_bit_cast(HalfOperand, a.r), d, 0, 0, 0);
  } else {
#if defined(__gfx908__)  // two halves of the depth: a lane's elements are the same in both operands
    typedef short HalfDepth __attribute__((ext_vector_type(2)));
    const auto left = __builtin_bit_cast(ShortOperand, b.r), right = __builtin_bit_cast(ShortOperand, a.r);
    d = __builtin_amdgcn_mfma_f32_16x16x8bf16(HalfDepth{left[0], left[1]}, HalfDepth{right[0], right[1]}, d, 0, 0, 0);
    d = __builtin_amdgcn_mfma_f32_16x16x8bf16(HalfDepth{left[2], left[3]}, HalfDepth{right[2], right[3]}, d, 0, 0, 0);
#else
    d = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(ShortOperand, b.r),
                                                  __builtin_bit_cast(ShortOperand, a.r), d, 0, 0, 0);
#endif
  }
#else
#if defined(SD_ORT_MMA_RDNA3)
  if constexpr (kHalf) {
    d = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(HalfOperand, b.r),
                                                   __builtin_bit_cast(HalfOperand, a.r), d);
  } else {
    d = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(ShortOperand, b.r),
                                                    __builtin_bit_cast(ShortOperand, a.r), d);
  }
#else
  if constexpr (kHalf) {
    d = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(__builtin_bit_cast(HalfOperand, b.r),
                                                         __builtin_bit_cast(HalfOperand, a.r), d);
  } else {
    d = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(__builtin_bit_cast(ShortOperand, b.r),
                                                          __builtin_bit_cast(ShortOperand, a.r), d);
  }
#endif
#endif
}
#endif

// Value of lane i ^ kPartner.
__device__ inline uint32_t exchange_halves(uint32_t value) {
#if SD_ORT_WAVE_SIZE == 32
  // Source lanes in the other half, for lanes 0 to 7 and 8 to 15.
  uint32_t low = kPartner == 16 ? 0x76543210 : 0xfedcba98, high = kPartner == 16 ? 0xfedcba98 : 0x76543210;
#if !defined(SD_ORT_EMULATED)
  asm("" : "+s"(low), "+s"(high));  // in scalar registers: a literal would lengthen each instruction by half
#endif
  uint32_t other = __builtin_amdgcn_permlanex16(value, value, low, high, false, false);
#if !defined(SD_ORT_EMULATED)
  // Executed here with all lanes active: clang 19 would move the instruction into a branch around a store, where lanes
  // without a store are inactive and their values are lost.
  asm volatile("" : "+v"(other));
#endif
  return other;
#else
  return __shfl_xor(value, kPartner, kWave);
#endif
}

// v_perm_b32: byte i of the result is byte select[i] of low (0-3) and high (4-7).
__device__ inline uint32_t permute_bytes(uint32_t high, uint32_t low, uint32_t select) {
  return __builtin_amdgcn_perm(high, low, select);
}
#endif

#if defined(SD_ORT_MMA_NVIDIA) && !defined(SD_ORT_EMULATED)
// ldmatrix: four 8 x 8 matrices whose 8 rows of 16 bytes lanes 0-7, 8-15, 16-23 and 24-31 point to.
template <bool kTransposed>
__device__ inline void load_matrices(Registers<uint32_t, 4>::type& r, const void* row) {
#if SD_ORT_CUDA_CODE
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// cp.async: copies 16 bytes from global memory to LDS, or zeros if not valid. Visible after wait_for_copies and a
// barrier. Inactive lanes copy nothing, without a branch.
__device__ inline void copy_16_bytes_async(void* to, const void* from, bool valid, bool active) {
#if SD_ORT_CUDA_CODE
  asm volatile(
      "{\n"
      ".reg .pred active;\n"
      "setp.ne.b32 active, %3, 0;\n"
      "@active cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0), "r"(static_cast<int>(active))
      : "memory");
#endif
}
__device__ inline void wait_for_copies() {
#if SD_ORT_CUDA_CODE
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#endif

// ---- loads and stores -------------------------------------------------------------------------------------------

__device__ inline void zero(Accumulator& accumulator) {
#pragma unroll
  for (int i = 0; i < kAccumulatorSize; ++i) accumulator.x[i] = 0.f;
}

// Loads an operand from LDS; element (row, depth) is at tile[row * stride + depth]. Rows are aligned to 16 bytes (CDNA:
// 8).
template <class T>
__device__ inline Operand<T> load_operand(const T* tile, int stride) {
  Operand<T> operand;
  const int lane = lane_id();
#if defined(SD_ORT_MMA_NVIDIA)
  load_matrices<false>(operand.r, tile + lane % 16 * stride + lane / 16 * 8);
#elif SD_ORT_WAVE_SIZE == 32
  // Loads of 16 bytes: clang 19 sometimes splits larger copies into bytes and loads at odd addresses.
  typedef uint32_t Quad __attribute__((ext_vector_type(4), may_alias));
  const auto* from = reinterpret_cast<const Quad*>(tile + operand_row(lane, 0) * stride + operand_depth(lane, 0));
#pragma unroll
  for (int i = 0; i < kOperandRegisters / 4; ++i) {
    const Quad quad = from[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) operand.r[4 * i + j] = quad[j];
  }
#else
  const T* from = tile + operand_row(lane, 0) * stride + operand_depth(lane, 0);
  memcpy(&operand.r, __builtin_assume_aligned(from, kPadding * sizeof(T)), sizeof(operand.r));
#endif
  return operand;
}

#if defined(SD_ORT_MMA_NVIDIA)
// Loads a transposed operand from LDS: element (row, depth) is at tile[depth * stride + row]. NVIDIA only; on AMD the
// tile is transposed when it is written.
template <class T>
__device__ inline Operand<T> load_operand_transposed(const T* tile, int stride) {
  Operand<T> operand;
  const int lane = lane_id();
  load_matrices<true>(operand.r, tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
  return operand;
}
#endif

// Part of a tile in memory order that a lane holds: kPieces runs of kPieceSize adjacent elements, run i starting at row
// piece_row(lane, i) and column piece_column(lane, i). All lanes together hold a 16 x 16 tile.
#if defined(SD_ORT_MMA_NVIDIA)
constexpr int kPieces = 4;
constexpr int kPieceSize = 2;
__host__ __device__ constexpr int piece_row(int lane, int piece) { return operand_row(lane, 2 * piece); }
__host__ __device__ constexpr int piece_column(int lane, int piece) { return operand_depth(lane, 2 * piece); }
#else
constexpr int kPieces = 1;
constexpr int kPieceSize = 256 / kWave;
__host__ __device__ constexpr int piece_row(int lane, int) { return lane_row(lane); }
__host__ __device__ constexpr int piece_column(int lane, int) { return lane / 16 * kPieceSize; }
#endif

struct Pieces {
  typename Registers<uint32_t, kPieces * kPieceSize / 2>::type r;
};

#if defined(SD_ORT_MMA_RDNA2) || defined(SD_ORT_MMA_RDNA3)
// Selects by a mask of all ones or zeros. Not `?:`, which the compiler turns into an index into memory.
__device__ inline uint32_t select(uint32_t mask, uint32_t yes, uint32_t no) { return (yes & mask) | (no & ~mask); }

__device__ inline uint32_t second_half_mask() { return lane_id() / 16 ? 0xffffffffu : 0u; }

// Lanes of the first half hold even columns, their partners in the second half odd ones. Returns from both lanes'
// packed columns (c, c + 2) the pairs (c, c + 1) and (c + 2, c + 3).
__device__ inline uint32_t interleave_low(uint32_t mine, uint32_t other) {
  return permute_bytes(other, mine, select(second_half_mask(), 0x01000504u, 0x05040100u));
}
__device__ inline uint32_t interleave_high(uint32_t mine, uint32_t other) {
  return permute_bytes(other, mine, select(second_half_mask(), 0x03020706u, 0x07060302u));
}
#endif

template <class T>
__device__ Pieces to_pieces(const Accumulator& accumulator);
template <class T>
__device__ Operand<T> from_pieces(const Pieces& pieces);

// Converts the accumulator to a T operand with accumulator columns as depth: the A operand of the next GEMM.
template <class T>
__device__ inline Operand<T> to_operand(const Accumulator& accumulator) {
  Operand<T> operand;
#if defined(SD_ORT_MMA_RDNA3)
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t mine = pack<T>(accumulator.x[2 * i], accumulator.x[2 * i + 1]);
    const uint32_t other = exchange_halves(mine);
    operand.r[2 * i] = interleave_low(mine, other);
    operand.r[2 * i + 1] = interleave_high(mine, other);
  }
#elif defined(SD_ORT_MMA_RDNA2)
  operand = from_pieces<T>(to_pieces<T>(accumulator));
#else
#pragma unroll
  for (int i = 0; i < kOperandRegisters; ++i) {
    operand.r[i] = pack<T>(accumulator.x[2 * i], accumulator.x[2 * i + 1]);
  }
#endif
  return operand;
}

// Converts the accumulator to T in memory order.
template <class T>
__device__ inline Pieces to_pieces(const Accumulator& accumulator) {
  Pieces pieces;
#if defined(SD_ORT_MMA_RDNA3)
  // The first half of the wave keeps columns 0-7 and the second 8-15; each sends the columns of the other.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t first = pack<T>(accumulator.x[2 * i], accumulator.x[2 * i + 1]);
    const uint32_t second = pack<T>(accumulator.x[4 + 2 * i], accumulator.x[4 + 2 * i + 1]);
    const uint32_t mask = second_half_mask();
    const uint32_t mine = select(mask, second, first);
    const uint32_t other = exchange_halves(select(mask, first, second));
    pieces.r[2 * i] = interleave_low(mine, other);
    pieces.r[2 * i + 1] = interleave_high(mine, other);
  }
#elif defined(SD_ORT_MMA_RDNA2)
#pragma unroll
  for (int i = 0; i < 4; ++i) pieces.r[i] = pack<T>(accumulator.x[2 * i], accumulator.x[2 * i + 1]);
#else
  const Operand<T> operand = to_operand<T>(accumulator);
  memcpy(&pieces.r, &operand.r, sizeof(pieces.r));
#endif
  return pieces;
}

// Converts memory order to an operand. On RDNA2 and RDNA3 every lane also needs its partner's half of the row.
template <class T>
__device__ inline Operand<T> from_pieces(const Pieces& pieces) {
  Operand<T> operand;
#if defined(SD_ORT_MMA_RDNA2) || defined(SD_ORT_MMA_RDNA3)
  const uint32_t mask = second_half_mask();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t other = exchange_halves(pieces.r[i]);
    operand.r[i] = select(mask, other, pieces.r[i]);
    operand.r[4 + i] = select(mask, pieces.r[i], other);
  }
#else
  memcpy(&operand.r, &pieces.r, sizeof(operand.r));
#endif
  return operand;
}

// An operand held for a long time. On RDNA2 and RDNA3, whose operands take twice the registers of their data, kSmall
// stores only the lane's own part and fetches the partner's at use.
template <class T, bool kSmall>
struct HeldOperand {
  static constexpr bool kOwnPiece = kWideOperands && kSmall;
  std::conditional_t<kOwnPiece, Pieces, Operand<T>> stored;

  __device__ void hold(const Pieces& pieces) {
    if constexpr (kOwnPiece) {
      stored = pieces;
    } else {
      stored = from_pieces<T>(pieces);
    }
  }
  __device__ Operand<T> get() const {
    if constexpr (kOwnPiece) {
      return from_pieces<T>(stored);
    } else {
      return stored;
    }
  }
};

// ---- reductions over a row of an accumulator: lanes that share the row --------------------------------------------

template <class Op>
__device__ inline float reduce_row(float value) {
#if defined(SD_ORT_MMA_NVIDIA)
  value = Op::merge(value, shuffle_xor(value, 1));
  value = Op::merge(value, shuffle_xor(value, 2));
#else
#pragma unroll
  for (int mask = kPartner; mask < kWave; mask *= 2) value = Op::merge(value, shuffle_xor(value, mask));
#endif
  return value;
}

}  // namespace mma
}  // namespace sd_ort
