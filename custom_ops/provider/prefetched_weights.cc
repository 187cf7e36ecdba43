#include "provider/prefetched_weights.h"

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "common/platform.h"

namespace sd_ort {

PrefetchedWeights::PrefetchedWeights(int device, const std::string& file, size_t bytes)
    : device_(device), bytes_(bytes), data_((device::use(device), static_cast<char*>(device::allocate(bytes)))) {
  if (data_ == nullptr) throw std::runtime_error("out of device memory for the weights");
  try {
    reader_ = std::thread([this, file] {
      try {
        read(file);
      } catch (...) {
        failed_ = std::current_exception();
      }
    });
  } catch (...) {
    device::release(data_);
    throw;
  }
}

PrefetchedWeights::~PrefetchedWeights() {
  if (reader_.joinable()) reader_.join();
  device::release(data_);
}

void PrefetchedWeights::wait() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reader_.joinable()) reader_.join();
  if (failed_) std::rethrow_exception(failed_);
}

void PrefetchedWeights::read(const std::string& file) {
  device::use(device_);
  CopyJob job(device_, data_, bytes_, [&file](char* buffer, size_t begin, size_t count) {
    std::ifstream stream(file, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(begin));
    if (!stream.read(buffer, static_cast<std::streamsize>(count))) throw std::runtime_error(file + " cannot be read");
  });
  StagedCopiers copiers;
  add_copiers(copiers, job);
  if (copiers.empty()) throw std::runtime_error("out of pinned memory to read the weights");
  copy_staged(copiers, job);
}

void* PrefetchedWeights::address(const std::string& name, size_t offset, size_t bytes) {
  if (offset > bytes_ || bytes > bytes_ - offset) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  names_.insert(name);
  return data_ + offset;
}

bool PrefetchedWeights::holds(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return names_.count(name) != 0;
}

void PrefetchedWeights::reject(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reason_ = reason;
}

std::string PrefetchedWeights::reason() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

}  // namespace sd_ort

using sd_ort::PrefetchedWeights;
using sd_ort::status_of;

// These functions return 0, or 1 on failure.
SD_ORT_EXPORT int sd_ort_WeightsRead(void** weights, int device, const char* file, uint64_t bytes) {
  return status_of([&] { *weights = new PrefetchedWeights(device, file, bytes); });
}
SD_ORT_EXPORT int sd_ort_WeightsWait(void* weights) {
  return status_of([&] { static_cast<PrefetchedWeights*>(weights)->wait(); });
}
// Returns 1 if the provider rejected a session with the weights, and copies the reason to `reason` of `bytes` bytes.
SD_ORT_EXPORT int sd_ort_WeightsRejected(void* weights, char* reason, int bytes) {
  const std::string found = static_cast<PrefetchedWeights*>(weights)->reason();
  std::snprintf(reason, static_cast<size_t>(bytes), "%s", found.c_str());
  return found.empty() ? 0 : 1;
}
// No session may use the weights any more.
SD_ORT_EXPORT void sd_ort_WeightsRelease(void* weights) { delete static_cast<PrefetchedWeights*>(weights); }
// Returns the device address of initializer `name` at an offset of the file; null if it is out of range.
SD_ORT_EXPORT void* sd_ort_WeightsAddress(void* weights, const char* name, uint64_t offset, uint64_t bytes) {
  void* found = nullptr;
  (void)status_of([&] { found = static_cast<PrefetchedWeights*>(weights)->address(name, offset, bytes); });
  return found;
}
