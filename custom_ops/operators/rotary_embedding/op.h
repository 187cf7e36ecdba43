// RotaryEmbedding(X, position_ids, cos, sin) -> Y: turns the pairs of each head of X (B, S, N * D) by angles whose
// cosines and sines are in row position_ids[0] + s of cos and sin (L, D / 2) for token s. A pair is (2i, 2i + 1) with
// `interleaved`, else (i, i + D / 2). As com.microsoft::RotaryEmbedding with one position. Rows outside of the tables
// are the nearest ones.
#pragma once

#include "common/op.h"

namespace sd_ort {

struct RotaryEmbeddingParams {
  DType dtype;
  const void* x;             // (batch, length, heads, 2 * pairs)
  const int64_t* positions;  // (1)
  const void* cos;           // (table_rows, pairs)
  const void* sin;           // (table_rows, pairs)
  void* y;                   // as x
  int64_t batch;
  int64_t length;
  int64_t heads;
  int64_t pairs;  // D / 2
  int64_t table_rows;
  int32_t interleaved;

  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(batch * length) + "x" + std::to_string(heads) + "x" +
           std::to_string(2 * pairs) + (interleaved ? "_interleaved" : "");
  }
  std::vector<Output> outputs() const { return {{y, static_cast<size_t>(batch * length * heads * 2 * pairs), dtype}}; }
};

// vectors: 8 bytes of each half of the pairs per thread, which sizes and addresses must allow; else one pair.
const char* rotary_embedding_launch(const RotaryEmbeddingParams& params, bool vectors, void* stream);

}  // namespace sd_ort
