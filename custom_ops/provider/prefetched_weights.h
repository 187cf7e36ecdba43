// A model's data file in one block of a device, read while ONNX Runtime prepares the session that takes its tensors
// (sd_ort/runtime/device_weights.py). ONNX Runtime itself maps, copies and unmaps one tensor after another.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "provider/staged_copy.h"

namespace sd_ort {

class Weights {
 public:
  // The first `bytes` of the file; they are read by threads of its own. Throws std::runtime_error when there is no
  // memory for them.
  Weights(int device, const std::string& file, size_t bytes);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // Returns when all is on the device. Throws what went wrong.
  void wait();

  // The place of a tensor, or null when it is not within the file; sessions are given it under `name`.
  void* place(const std::string& name, size_t offset, size_t bytes);
  bool holds(const std::string& name) const;
  bool contains(const void* data) const { return data >= data_ && data < data_ + bytes_; }

  // Says why a session cannot have them.
  void refuse(const std::string& reason);
  bool is_refused() const { return !reason().empty(); }
  std::string reason() const;
  int device() const { return device_; }

 private:
  void read(const std::string& file);

  const int device_;
  const size_t bytes_;
  char* const data_;
  std::thread reader_;
  std::exception_ptr failed_;  // written by the reader
  mutable std::mutex mutex_;
  std::set<std::string> names_;
  std::string reason_;
};

}  // namespace sd_ort
