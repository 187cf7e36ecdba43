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

// Transformed filters of all sessions by address, with the parameters of the transformation and the device.
struct CachedFilters {
  WinogradFiltersParams params;
  int device;
};
struct FilterRegistry {
  std::mutex mutex;
  std::map<const void*, CachedFilters> at;
};
FilterRegistry& filter_registry() {
  static FilterRegistry* const all = new FilterRegistry;  // never deleted: a session may outlive the statics
  return *all;
}

void transform(const WinogradFiltersParams& params, device::Stream stream) {
  check_launch(winograd_filters_gpu().run(0, &params, nullptr, stream));
}

}  // namespace

WinogradFilterCache::~WinogradFilterCache() {
  {
    const std::lock_guard<std::mutex> lock(filter_registry().mutex);
    filter_registry().at.erase(filters_);
  }
  pool_->release(filters_);
}

const void* WinogradFilterCache::get(const NhwcConvParams& params, device::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (filters_ == nullptr && !is_disabled_ && !device::is_capturing(stream)) create(params, stream);
  return filters_;
}

void WinogradFilterCache::create(const NhwcConvParams& params, device::Stream stream) {
  WinogradFiltersParams filters{params.dtype, params.filters, nullptr, params.filter_count, params.channels, 0};
  if (has_free_memory()) filters.y = pool_->allocate(filters.outputs()[0].count * size_of(params.dtype));
  is_disabled_ = filters.y == nullptr;
  if (is_disabled_) return;
  filters_ = filters.y;
  transform(filters, stream);
  const std::lock_guard<std::mutex> lock(filter_registry().mutex);
  filter_registry().at[filters_] = {filters, pool_->device()};
}

bool WinogradFilterCache::has_free_memory() const {
  const device::Memory memory = device::memory();
  return pool_->statistics().limit == SIZE_MAX && memory.free > memory.total / 4;
}

void WinogradFilterCache::update(const void* filters) {
  const std::lock_guard<std::mutex> lock(filter_registry().mutex);
  for (const auto& [address, cached] : filter_registry().at) {
    if (cached.params.weight != filters) continue;
    device::use(cached.device);
    const device::Stream stream = device::create_stream();
    device::wait_for_all_in_stream(stream);
    transform(cached.params, stream);
    device::wait(stream);
    device::destroy_stream(stream);
  }
}

}  // namespace sd_ort

// For Python: the weight at this address, which open sessions read, was updated in place. Returns 0, or 1 on failure.
SD_ORT_EXPORT int sd_ort_WeightUpdated(const void* weight) {
  return sd_ort::status_of([&] { sd_ort::WinogradFilterCache::update(weight); });
}
