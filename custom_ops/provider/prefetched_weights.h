// External data of a model in one device allocation, read in the background while ONNX Runtime creates the session
// (sd_ort/runtime/weight_prefetch.py). ONNX Runtime itself maps, copies and unmaps one tensor after another.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "provider/staged_copy.h"

namespace sd_ort {

class PrefetchedWeights {
 public:
  // Starts to read the first `bytes` of the file in background threads. Throws std::runtime_error if out of memory.
  PrefetchedWeights(int device, const std::string& file, size_t bytes);
  ~PrefetchedWeights();
  PrefetchedWeights(const PrefetchedWeights&) = delete;
  PrefetchedWeights& operator=(const PrefetchedWeights&) = delete;

  // Waits until all data is on the device; rethrows the error of the reader.
  void wait();

  // Returns the device address of a tensor, or null if it is out of range, and registers initializer `name`.
  void* address(const std::string& name, size_t offset, size_t bytes);
  bool holds(const std::string& name) const;
  bool contains(const void* data) const { return data >= data_ && data < data_ + bytes_; }

  // Stores the reason why a session cannot use the weights.
  void reject(const std::string& reason);
  bool is_rejected() const { return !reason().empty(); }
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
