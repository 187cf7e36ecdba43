#include "provider/weights.h"

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

namespace {

// DLPack's tensor with its owner, as version 0.8 of its header has it
// (https://dmlc.github.io/dlpack/latest/c_api.html).
struct DLManagedTensor {
  struct {
    void* data;
    struct {
      int32_t type, number;
    } device;
    int32_t rank;
    struct {
      uint8_t code, bits;
      uint16_t lanes;
    } element;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
  } tensor;
  void* owner;
  void (*deleter)(DLManagedTensor*);
};

constexpr int32_t kGpu = 2;  // kDLCUDA, which is what ONNX Runtime calls the memory of any plugin's GPU

struct View {
  DLManagedTensor dlpack{};
  std::vector<int64_t> shape;
  std::shared_ptr<Weights> weights;
};

using Shared = std::shared_ptr<Weights>;

}  // namespace
}  // namespace sd_ort

using sd_ort::Shared;
using sd_ort::status_of;
using sd_ort::Weights;

// 0, or 1 for a failure.
SD_ORT_EXPORT int sd_ort_WeightsRead(void** weights, int device, const char* file, uint64_t bytes) {
  return status_of([&] { *weights = new Shared(std::make_shared<Weights>(device, file, bytes)); });
}
SD_ORT_EXPORT int sd_ort_WeightsWait(void* weights) {
  return status_of([&] { (*static_cast<Shared*>(weights))->wait(); });
}
// Whether the provider refused a session with them, and why, in `bytes` of `reason`.
SD_ORT_EXPORT int sd_ort_WeightsRefused(void* weights, char* reason, int bytes) {
  const std::string found = (*static_cast<Shared*>(weights))->reason();
  std::snprintf(reason, static_cast<size_t>(bytes), "%s", found.c_str());
  return found.empty() ? 0 : 1;
}
// Views that were taken keep the memory.
SD_ORT_EXPORT void sd_ort_WeightsRelease(void* weights) { delete static_cast<Shared*>(weights); }

// A DLManagedTensor of floating numbers in the file (DLPack's code and bits of an element), or null.
SD_ORT_EXPORT void* sd_ort_WeightsView(void* weights, const char* name, uint64_t offset, int code, int bits,
                                       const int64_t* shape, int rank) {
  sd_ort::DLManagedTensor* made = nullptr;
  (void)status_of([&] {
    auto view = std::make_unique<sd_ort::View>();
    view->weights = *static_cast<Shared*>(weights);
    view->shape.assign(shape, shape + rank);
    uint64_t bytes = static_cast<uint64_t>(bits) / 8;
    for (int64_t size : view->shape) bytes *= static_cast<uint64_t>(size);
    sd_ort::DLManagedTensor& dlpack = view->dlpack;
    dlpack.tensor.data = view->weights->place(name, offset, bytes);
    if (dlpack.tensor.data == nullptr) return;
    dlpack.tensor.device = {sd_ort::kGpu, view->weights->device()};
    dlpack.tensor.rank = rank;
    dlpack.tensor.element = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
    dlpack.tensor.shape = view->shape.data();
    dlpack.owner = view.get();
    dlpack.deleter = [](sd_ort::DLManagedTensor* self) { delete static_cast<sd_ort::View*>(self->owner); };
    made = &view.release()->dlpack;
  });
  return made;
}
