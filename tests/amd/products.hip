// Kernels of test_simulated_kernels.py: common/mma.h's products of one wave, on tiles of 16 x 16.
#include "common/mma.h"
#include "common/reduce.h"

namespace sd_ort {

// results: A B^T, then (A B^T) C^T twice (converted at once, and held in pieces), as floats in the order of rows; then
// the largest element of each row of A B^T.
template <class T>
__device__ void multiply(const T* operands, float* results, T* stored) {
  using namespace mma;
  constexpr int kStride = kTile + kPadding, kSize = kTile * kTile;
  alignas(16) __shared__ T lds[3][kTile * kStride];
  for (int i = threadIdx.x; i < 3 * kSize; i += kWave) {
    lds[i / kSize][i % kSize / kTile * kStride + i % kTile] = operands[i];
  }
  block_barrier();
  Accumulator product, chained, held;
  zero(product);
  zero(chained);
  zero(held);
  multiply_add(product, load_operand(lds[0], kStride), load_operand(lds[1], kStride));
  multiply_add(chained, to_operand<T>(product), load_operand(lds[2], kStride));
  HeldOperand<T, true> operand;
  operand.hold(to_pieces<T>(product));
  multiply_add(held, operand.get(), load_operand(lds[2], kStride));

  const int lane = lane_id();
  float largest = product.x[0];
  for (int i = 0; i < kAccumulatorSize; ++i) {
    const int at = accumulator_row(lane, i) * kTile + accumulator_column(lane, i);
    results[at] = product.x[i];
    results[kSize + at] = chained.x[i];
    results[2 * kSize + at] = held.x[i];
    largest = fmaxf(largest, product.x[i]);
  }
  results[3 * kSize + slot_row(lane, 0)] = reduce_row<Max>(largest);
  const Pieces pieces = to_pieces<T>(product);
  memcpy(stored + piece_row(lane, 0) * kTile + piece_column(lane, 0), &pieces.r, sizeof(pieces.r));
}

}  // namespace sd_ort

extern "C" __global__ void multiply_halves(const sd_ort::half_t* operands, float* results, sd_ort::half_t* stored) {
  sd_ort::multiply(operands, results, stored);
}
extern "C" __global__ void multiply_bfloat16(const sd_ort::bf16_t* operands, float* results, sd_ort::bf16_t* stored) {
  sd_ort::multiply(operands, results, stored);
}
