#include "provider/prefetched_weights.h"

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "common/platform.h"

namespace sd_ort {

Weights::Weights(int device, const std::string& file, size_t bytes)
    : device_(device), bytes_(bytes), data_((device::use(device), static_cast<char*>(device::allocate(bytes)))) {
  if (data_ == nullptr) throw std::runtime_error("there is no more device memory for the weights");
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

Weights::~Weights() {
  if (reader_.joinable()) reader_.join();
  device::release(data_);
}

void Weights::wait() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reader_.joinable()) reader_.join();
  if (failed_) std::rethrow_exception(failed_);
}

void Weights::read(const std::string& file) {
  device::use(device_);
  Job job(device_, data_, bytes_, [&file](char* piece, size_t begin, size_t count) {
    std::ifstream stream(file, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(begin));
    if (!stream.read(piece, static_cast<std::streamsize>(count))) throw std::runtime_error(file + " cannot be read");
  });
  Lanes lanes;
  open_lanes(lanes, job);
  if (lanes.empty()) throw std::runtime_error("there is no more pinned memory to read weights through");
  send(lanes, job);
}

void* Weights::place(const std::string& name, size_t offset, size_t bytes) {
  if (offset > bytes_ || bytes > bytes_ - offset) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  names_.insert(name);
  return data_ + offset;
}

bool Weights::holds(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return names_.count(name) != 0;
}

void Weights::refuse(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reason_ = reason;
}

std::string Weights::reason() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

}  // namespace sd_ort

using sd_ort::status_of;
using sd_ort::Weights;

// 0, or 1 for a failure.
SD_ORT_EXPORT int sd_ort_WeightsRead(void** weights, int device, const char* file, uint64_t bytes) {
  return status_of([&] { *weights = new Weights(device, file, bytes); });
}
SD_ORT_EXPORT int sd_ort_WeightsWait(void* weights) {
  return status_of([&] { static_cast<Weights*>(weights)->wait(); });
}
// Whether the provider refused a session with them, and why, in `bytes` of `reason`.
SD_ORT_EXPORT int sd_ort_WeightsRefused(void* weights, char* reason, int bytes) {
  const std::string found = static_cast<Weights*>(weights)->reason();
  std::snprintf(reason, static_cast<size_t>(bytes), "%s", found.c_str());
  return found.empty() ? 0 : 1;
}
// No session may read them any more.
SD_ORT_EXPORT void sd_ort_WeightsRelease(void* weights) { delete static_cast<Weights*>(weights); }
// The place of a tensor in the file, which a session is given as `name`; null where it is not within the file.
SD_ORT_EXPORT void* sd_ort_WeightsPlace(void* weights, const char* name, uint64_t offset, uint64_t bytes) {
  void* found = nullptr;
  (void)status_of([&] { found = static_cast<Weights*>(weights)->place(name, offset, bytes); });
  return found;
}
