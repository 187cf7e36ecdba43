// RotaryQkv(qkv, other?, q_scale?, k_scale?, other_q_scale?, other_k_scale?, cos?, sin?) -> Y: prepares the heads of a
// joint attention. Y (B, S + T, N, 3, H) has the tokens of qkv (B, S, N, 3, H), then those of other (B, T, N, 3, H).
//
// Queries and keys are divided by the root of their mean square over H, plus epsilon, and multiplied by a scale (H) of
// their stream; then pairs are turned by the angles of the token, whose cosines and sines are a row of cos and sin
// (S + T, H / 2). A pair is (2i, 2i + 1) with `interleaved`, else (i, i + H / 2). Values are copied.
#pragma once

#include "common/op.h"

namespace sd_ort {

// Tokens of one stream. `q_scale` and `k_scale` are both null if its heads are not normalized.
struct RotaryQkvStream {
  const void* qkv;      // (batch, length, heads, 3, 2 * pairs) or null
  const void* q_scale;  // (2 * pairs) or null
  const void* k_scale;
  int64_t length;
};

struct RotaryQkvParams {
  DType dtype;
  RotaryQkvStream first;
  RotaryQkvStream second;  // its length is 0 if it is absent
  const void* cos;         // (length of both, pairs) or null
  const void* sin;         // as cos
  void* y;                 // (batch, length of both, heads, 3, 2 * pairs); may be first.qkv if the second is absent
  int64_t batch;
  int64_t heads;
  int64_t pairs;  // H / 2
  float epsilon;
  int32_t interleaved;

  int64_t length() const { return first.length + second.length; }
  std::string signature() const {
    return std::string(name_of(dtype)) + "_" + std::to_string(batch * first.length) + "+" +
           std::to_string(batch * second.length) + "x" + std::to_string(heads) + "x" + std::to_string(2 * pairs) +
           (first.q_scale == nullptr ? "" : "_norm") + (cos == nullptr ? "" : "_rotary") +
           (interleaved ? "_interleaved" : "");
  }
  std::vector<Output> outputs() const {
    return {{y, static_cast<size_t>(batch * length() * heads * 6 * pairs), dtype}};
  }
};

// lanes: threads per head, each with 8 bytes of both halves of its pairs, which sizes and addresses must allow; 0: one
// thread per pair of a head.
const char* rotary_qkv_launch(const RotaryQkvParams& params, int lanes, void* stream);

}  // namespace sd_ort
