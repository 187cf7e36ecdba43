// The instructions that common/mma.h wraps, in software. Where each element of an operand lies is written here from the
// vendors' tables, in the hardware's terms (D = A B, A is M x K, B is K x N) and apart from mma.h's own functions:
//   AMD     "AMD Instinct MI300 / RDNA3 / RDNA4 Instruction Set Architecture", as printed by ROCm's
//           amd_matrix_instruction_calculator: v{lane}[half] of A[M][K], B[K][N], D[M][N]
//   NVIDIA  PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type", and ldmatrix
#pragma once

#include "common/float8.h"
#include "emulator.h"

namespace sd_ort {
namespace mma {

template <class T>
float element(uint32_t packed, int half) {
  T pair[2];
  std::memcpy(pair, &packed, sizeof(pair));
  return to_float(pair[half]);
}

// The product of two elements, each one of the two in a register.
template <class T>
double product(uint32_t packed_a, uint32_t packed_b, int half) {
  return double(element<T>(packed_a, half)) * element<T>(packed_b, half);
}

// Of pairs of float8 the sum of two products: their depth is twice that of the tables, in the same bytes. CDNA3 reads
// FNUZ, whose bits mean half of OCP's value.
template <>
inline double product<float8x2_t>(uint32_t packed_a, uint32_t packed_b, int half) {
  double sum = 0;
  for (int byte = 2 * half; byte < 2 * half + 2; ++byte) {
    const auto a = static_cast<uint8_t>(packed_a >> 8 * byte), b = static_cast<uint8_t>(packed_b >> 8 * byte);
#if defined(SD_ORT_MMA_CDNA)
    if (a == 0x80 || b == 0x80) return NAN;
    sum += double(float8_to_float(a)) * float8_to_float(b) / 4;
#else
    sum += double(float8_to_float(a)) * float8_to_float(b);
#endif
  }
  return sum;
}

struct OperandPair {
  uint32_t a[kOperandRegisters], b[kOperandRegisters];  // the hardware's A and B
  float c[kAccumulatorSize];
};

#if defined(SD_ORT_MMA_NVIDIA)
// mma.sync.m16n8k16: columns 8 * n .. 8 * n + 7 of B come from registers b[n] and b[n + 2] of mma.h's operand.
template <class T>
void multiply_add(Accumulator& accumulator, const Operand<T>& a, const Operand<T>& b) {
  OperandPair given;
  std::memcpy(given.a, &a.r, sizeof(given.a));
  std::memcpy(given.b, &b.r, sizeof(given.b));
  std::memcpy(given.c, &accumulator.x, sizeof(given.c));
  accumulator = emulator::exchange<Accumulator>(given, "mma", [](const OperandPair* lanes, Accumulator* d) {
    for (int n_tile = 0; n_tile < 2; ++n_tile) {
      for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 8; ++n) {
          double sum = 0;
          for (int k = 0; k < 16; ++k) {
            // A: a0,a1 (g, 2t), a2,a3 (g + 8, 2t), a4,a5 (g, 2t + 8), a6,a7 (g + 8, 2t + 8). B: b0,b1 (2t), b2,b3 (2t +
            // 8).
            const int thread = k % 8 / 2;
            const uint32_t from_a = lanes[m % 8 * 4 + thread].a[m / 8 + 2 * (k / 8)];
            const uint32_t from_b = lanes[n * 4 + thread].b[n_tile + 2 * (k / 8)];
            sum += product<T>(from_a, from_b, k % 2);
          }
          // C: c0,c1 (g, 2t), c2,c3 (g + 8, 2t)
          const int lane = m % 8 * 4 + n / 2, at = n_tile * 4 + m / 8 * 2 + n % 2;
          d[lane].x[at] = static_cast<float>(lanes[lane].c[at] + sum);
        }
      }
    }
  });
}

template <bool kTransposed>
void load_matrices(Registers<uint32_t, 4>::type& r, const void* row) {
  struct Taken {
    uint32_t r[4];
  };
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulator::fail("ldmatrix: the row is not aligned to 16 bytes");
  const auto taken = emulator::exchange<Taken>(row, "ldmatrix", [](const void* const* rows, Taken* lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t m[8][8];
      for (int i = 0; i < 8; ++i) std::memcpy(m[i], rows[matrix * 8 + i], 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int i = lane / 4, j = lane % 4 * 2;
        const uint32_t low = kTransposed ? m[j][i] : m[i][j];
        const uint32_t high = kTransposed ? m[j + 1][i] : m[i][j + 1];
        lanes[lane].r[matrix] = low | high << 16;
      }
    }
  });
  std::memcpy(&r, taken.r, sizeof(r));
}

// cp.async: nothing arrives before wait_for_copies.
inline void copy_16_bytes_async(void* to, const void* from, bool valid, bool active) {
  if (!active) return;
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulator::fail("cp.async: the target is not aligned to 16 bytes");
  emulator::PendingCopy copy{to, {}, emulator::self().copy_groups};
  if (valid) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) emulator::fail("cp.async: the source is not aligned to 16 bytes");
    std::memcpy(copy.bytes, from, 16);
  }
  emulator::self().copies.push_back(copy);
}
inline void wait_for_copies() {
  emulator::commit_copies();
  emulator::wait_for_copies(0);
}
#else
#if defined(SD_ORT_MMA_RDNA2)
// v_dot2c_f32_f16 with DPP row_share:n ("RDNA 2" ISA, DPP): S0 comes from lane n of the lane's row of 16 lanes.
// Register n of the accumulator takes n, register k / 2 of the operands has depths k and k + 1.
template <class T>
void multiply_add(Accumulator& accumulator, const Operand<T>& a, const Operand<T>& b) {
  OperandPair given;
  std::memcpy(given.a, &a.r, sizeof(given.a));
  std::memcpy(given.b, &b.r, sizeof(given.b));
  std::memcpy(given.c, &accumulator.x, sizeof(given.c));
  accumulator = emulator::exchange<Accumulator>(given, "dot2", [](const OperandPair* lanes, Accumulator* d) {
    for (int lane = 0; lane < kWave; ++lane) {
      for (int n = 0; n < kAccumulatorSize; ++n) {
        const OperandPair& shared = lanes[lane / 16 * 16 + n];
        double sum = 0;
        for (int k = 0; k < 16; ++k) {
          sum += product<T>(lanes[lane].a[k / 2], shared.b[k / 2], k % 2);
        }
        d[lane].x[n] = static_cast<float>(lanes[lane].c[n] + sum);
      }
    }
  });
}

inline uint32_t exchange_halves(uint32_t value) { return __shfl_xor(value, kPartner); }
#else
#if defined(SD_ORT_MMA_CDNA)
// A[M][K] in v{M + 16 * (K / 4)}, register K % 4 / 2, half K % 2; B likewise with N; D[M][N] in v(M % 4){N + 16 * (M /
// 4)}.
inline int operand_lane(int outer, int k) { return outer + 16 * (k / 4); }
inline int operand_register(int k) { return k % 4 / 2; }
inline int result_lane(int m, int n) { return n + 16 * (m / 4); }
inline int result_register(int m) { return m % 4; }
#elif defined(SD_ORT_MMA_RDNA3)
// A[M][K] in v(K / 2){M} and again {M + 16}, half K % 2; D[M][N] in v(M / 2){N + 16 * (M % 2)}.
inline int operand_lane(int outer, int) { return outer; }
inline int operand_register(int k) { return k / 2; }
inline int result_lane(int m, int n) { return n + 16 * (m % 2); }
inline int result_register(int m) { return m / 2; }
#else
// A[M][K] in lane M + 16 * (K / 4 % 2), register K / 8 * 2 + K % 4 / 2, half K % 2; D[M][N] in v(M % 8){N + 16 * (M /
// 8)}.
inline int operand_lane(int outer, int k) { return outer + 16 * (k / 4 % 2); }
inline int operand_register(int k) { return k / 8 * 2 + k % 4 / 2; }
inline int result_lane(int m, int n) { return n + 16 * (m / 8); }
inline int result_register(int m) { return m % 8; }
#endif

template <class T>
void multiply_add(Accumulator& accumulator, const Operand<T>& a, const Operand<T>& b) {
  OperandPair given;
  std::memcpy(given.a, &b.r, sizeof(given.a));  // mma.h runs the instruction transposed
  std::memcpy(given.b, &a.r, sizeof(given.b));
  std::memcpy(given.c, &accumulator.x, sizeof(given.c));
  accumulator = emulator::exchange<Accumulator>(given, "mma", [](const OperandPair* lanes, Accumulator* d) {
#if defined(SD_ORT_MMA_RDNA3)
    for (int lane = 0; lane < 16; ++lane) {
      if (std::memcmp(lanes[lane].a, lanes[lane + 16].a, sizeof(lanes[lane].a)) != 0 ||
          std::memcmp(lanes[lane].b, lanes[lane + 16].b, sizeof(lanes[lane].b)) != 0) {
        emulator::fail("wmma: the halves of a wave hold different operands");
      }
    }
#endif
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        double sum = 0;
        for (int k = 0; k < 16; ++k) {
          sum += product<T>(lanes[operand_lane(m, k)].a[operand_register(k)],
                            lanes[operand_lane(n, k)].b[operand_register(k)], k % 2);
        }
        const int lane = result_lane(m, n), at = result_register(m);
        d[lane].x[at] = static_cast<float>(lanes[lane].c[at] + sum);
      }
    }
  });
}

inline uint32_t exchange_halves(uint32_t value) { return __shfl_xor(value, 16); }
#endif

inline uint32_t permute_bytes(uint32_t high, uint32_t low, uint32_t select) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> (8 * (select >> (8 * i) & 0xf)) & 0xff) << (8 * i);
  return result;
}
#endif

}  // namespace mma
}  // namespace sd_ort
