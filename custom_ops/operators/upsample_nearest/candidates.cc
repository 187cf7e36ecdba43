// Candidates of UpsampleNearest: one element per thread, the widest access that a pixel supports, and 16 bytes per
// thread with three block sizes.
#include "common/tunable.h"
#include "operators/upsample_nearest/op.h"

namespace sd_ort {
namespace {

using Params = UpsampleNearestParams;

template <int kBytes>
bool supports(const Params& p) {
  return p.channels * size_of(p.dtype) % kBytes == 0 && are_aligned<kBytes>(p.x, p.y);
}

int element_bytes(const Params& p) { return static_cast<int>(size_of(p.dtype)); }
int widest_bytes(const Params& p) {
  return supports<16>(p) ? 16 : supports<8>(p) ? 8 : supports<4>(p) ? 4 : element_bytes(p);
}

Candidate<Params> candidate(const char* name, bool (*is_supported)(const Params&), int (*bytes)(const Params&),
                            int block) {
  return {name, is_supported, [bytes, block](const Params& p, void*, void* stream) {
            return upsample_nearest_launch(p, {bytes(p), block}, stream);
          }};
}

bool always(const Params&) { return true; }

}  // namespace

const GpuOp& upsample_nearest_gpu() {
  static const TunableOp<Params> op(
      "UpsampleNearest",
      {candidate("generic", always, element_bytes, 256), candidate("block_256", always, widest_bytes, 256),
       candidate("block_128", supports<16>, widest_bytes, 128),
       candidate("block_512", supports<16>, widest_bytes, 512)},
      [](const Params&) { return "block_256"; });
  return op;
}

}  // namespace sd_ort
