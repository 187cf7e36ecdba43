#include "provider/winograd_filter_cache.h"

#include <map>
#include <utility>

#include "common/platform.h"
#include "common/tunable.h"
#include "operators/winograd_filters/op.h"
#include "provider/kernel.h"

namespace sd_ort {

const GpuOp& winograd_filters_gpu();

namespace {

// All that are kept, by where they lie: how each was made, and on which device.
struct Kept {
  WinogradFiltersParams params;
  int device;
};
struct AllKept {
  std::mutex mutex;
  std::map<const void*, Kept> at;
};
AllKept& all_kept() {
  static AllKept* const all = new AllKept;  // never deleted: a session may be closed after this library's statics are
  return *all;
}

void transform(const WinogradFiltersParams& params, device::Stream stream) {
  launched(winograd_filters_gpu().run(0, &params, nullptr, stream));
}

}  // namespace

KeptFilters::~KeptFilters() {
  {
    const std::lock_guard<std::mutex> lock(all_kept().mutex);
    all_kept().at.erase(made_);
  }
  pool_->release(made_);
}

const void* KeptFilters::of(const NhwcConvParams& params, device::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (made_ == nullptr && !is_refused_ && !device::is_capturing(stream)) make(params, stream);
  return made_;
}

void KeptFilters::make(const NhwcConvParams& params, device::Stream stream) {
  WinogradFiltersParams filters{params.dtype, params.filters, nullptr, params.filter_count, params.channels, 0};
  if (has_room()) filters.y = pool_->allocate(filters.outputs()[0].count * size_of(params.dtype));
  is_refused_ = filters.y == nullptr;
  if (is_refused_) return;
  made_ = filters.y;
  transform(filters, stream);
  const std::lock_guard<std::mutex> lock(all_kept().mutex);
  all_kept().at[made_] = {filters, pool_->device()};
}

bool KeptFilters::has_room() const {
  const device::Memory memory = device::memory();
  return pool_->statistics().limit == SIZE_MAX && memory.free > memory.total / 4;
}

void KeptFilters::renew(const void* filters) {
  const std::lock_guard<std::mutex> lock(all_kept().mutex);
  for (const auto& [place, kept] : all_kept().at) {
    if (kept.params.weight != filters) continue;
    device::use(kept.device);
    const device::Stream stream = device::create_stream();
    device::wait_for_all_in_stream(stream);
    transform(kept.params, stream);
    device::wait(stream);
    device::destroy_stream(stream);
  }
}

}  // namespace sd_ort

// For Python: a weight at this address was written under sessions that read it. 0, or 1 for a failure.
SD_ORT_EXPORT int sd_ort_WeightWritten(const void* weight) {
  return sd_ort::status_of([&] { sd_ort::KeptFilters::renew(weight); });
}
