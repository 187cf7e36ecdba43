// Candidates of QuantizedAttention: MultiHeadAttention of the elements in float16, by its generic kernel and by its
// default; and the plans in float8 that cuDNN proposes (not on AMD).
#include "common/check.h"
#include "common/tunable.h"
#include "common/vendors/which.h"
#include "operators/quantized_attention/op.h"
#if !SD_ORT_HIP
#include "operators/quantized_attention/cudnn.h"
#endif

namespace sd_ort {

const GpuOp& multi_head_attention_gpu();

namespace {

using Params = QuantizedAttentionParams;

constexpr int64_t kAlignment = 256;

size_t elements_bytes(const Params& p) {
  return ceil_div(p.qkv_count() * size_of(p.dtype), kAlignment) * kAlignment;
}

// `choose` returns the candidate of MultiHeadAttention. Where its support depends on addresses, those are aligned.
Candidate<Params> in_float16(const char* name, int (*choose)(const MultiHeadAttentionParams&)) {
  const auto aligned = [](const Params& p) { return p.of(p.dtype, nullptr); };
  return {name, [](const Params&) { return true; },
          [=](const Params& p, void* workspace, void* stream) -> const char* {
            SD_ORT_RETURN_ERROR(dequantize_qkv_launch(p, workspace, stream));
            const MultiHeadAttentionParams attention = p.of(p.dtype, workspace);
            return multi_head_attention_gpu().run(choose(aligned(p)), &attention,
                                                  static_cast<char*>(workspace) + elements_bytes(p), stream);
          },
          [=](const Params& p) {
            const MultiHeadAttentionParams attention = aligned(p);
            return elements_bytes(p) + multi_head_attention_gpu().workspace_bytes(choose(attention), &attention);
          }};
}

int generic_attention(const MultiHeadAttentionParams&) { return 0; }

int default_attention(const MultiHeadAttentionParams& attention) {
  const int candidate = multi_head_attention_gpu().default_candidate(&attention);
  return multi_head_attention_gpu().is_supported(candidate, &attention) ? candidate : 0;
}

#if !SD_ORT_HIP
constexpr int kPlans = 4;

Candidate<Params> library_candidate(int index) {
  return {"cudnn_" + std::to_string(index), [=](const Params& p) { return CudnnQuantizedAttention(p).supports(index); },
          [=](const Params& p, void* workspace, void* stream) {
            return CudnnQuantizedAttention(p).run(index, workspace, stream);
          },
          [=](const Params& p) { return CudnnQuantizedAttention(p).workspace_bytes(index); }};
}
#endif

std::vector<Candidate<Params>> candidates() {
  std::vector<Candidate<Params>> all = {in_float16("generic", generic_attention),
                                        in_float16("float16", default_attention)};
#if !SD_ORT_HIP
  for (int index = 0; index < kPlans; ++index) all.push_back(library_candidate(index));
#endif
  return all;
}

std::string default_name(const Params& p) {
#if !SD_ORT_HIP
  if (library_candidate(0).is_supported(p)) return "cudnn_0";
#endif
  return "float16";
}

}  // namespace

const GpuOp& quantized_attention_gpu() {
  static const TunableOp<Params> op("QuantizedAttention", candidates(), default_name);
  return op;
}

}  // namespace sd_ort
