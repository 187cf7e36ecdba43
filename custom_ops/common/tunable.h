// GPU operators with several candidate kernels, as the C interface (gpu_library.cc) uses them. Plain C++.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/op.h"

namespace sd_ort {

// One implementation of an operator. `run` launches on `stream` (a hipStream_t or cudaStream_t) and returns null or an
// error message. `workspace` is uninitialized device memory of workspace_bytes(params) bytes.
template <class Params>
struct Candidate {
  std::string name;
  std::function<bool(const Params&)> is_supported;
  std::function<const char*(const Params&, void* workspace, void* stream)> run;
  std::function<size_t(const Params&)> workspace_bytes = [](const Params&) { return size_t{0}; };
};

// The generic kernel, which supports every call and needs no workspace.
template <class Params>
Candidate<Params> generic_candidate(const char* (*launch)(const Params&, void* stream)) {
  return {"generic", [](const Params&) { return true; },
          [launch](const Params& p, void*, void* stream) { return launch(p, stream); }};
}

// Type-erased operator: `params` points to the operator's Params. Candidate 0 is the generic kernel, which supports
// every call and is the tuner's reference.
class GpuOp {
 public:
  virtual ~GpuOp() = default;
  virtual const char* name() const = 0;
  virtual size_t params_size() const = 0;
  virtual int candidate_count() const = 0;
  virtual const char* candidate_name(int candidate) const = 0;
  virtual bool is_supported(int candidate, const void* params) const = 0;
  virtual size_t workspace_bytes(int candidate, const void* params) const = 0;
  virtual const char* run(int candidate, const void* params, void* workspace, void* stream) const = 0;
  // Key of a tuning result.
  virtual std::string signature(const void* params) const = 0;
  virtual std::vector<Output> outputs(const void* params) const = 0;
  // Candidate for calls without a tuning result; it supports the call if any candidate does.
  virtual int default_candidate(const void* params) const = 0;
};

// Params has `std::string signature() const` and `std::vector<Output> outputs() const`. `default_name` returns the name
// of the default candidate; candidate 0 if it is null.
template <class Params>
class TunableOp : public GpuOp {
 public:
  TunableOp(const char* name, std::vector<Candidate<Params>> candidates,
            std::function<std::string(const Params&)> default_name = nullptr)
      : name_(name), candidates_(std::move(candidates)), default_name_(std::move(default_name)) {}

  const char* name() const override { return name_; }
  size_t params_size() const override { return sizeof(Params); }
  int candidate_count() const override { return static_cast<int>(candidates_.size()); }
  const char* candidate_name(int candidate) const override { return candidates_[candidate].name.c_str(); }
  bool is_supported(int candidate, const void* params) const override {
    return candidates_[candidate].is_supported(cast(params));
  }
  size_t workspace_bytes(int candidate, const void* params) const override {
    return candidates_[candidate].workspace_bytes(cast(params));
  }
  const char* run(int candidate, const void* params, void* workspace, void* stream) const override {
    return candidates_[candidate].run(cast(params), workspace, stream);
  }
  std::string signature(const void* params) const override { return cast(params).signature(); }
  std::vector<Output> outputs(const void* params) const override { return cast(params).outputs(); }
  int default_candidate(const void* params) const override {
    const std::string name = default_name_ ? default_name_(cast(params)) : "";
    for (int i = 0; i < candidate_count(); ++i) {
      if (candidates_[i].name == name) return i;
    }
    return 0;
  }

 private:
  static const Params& cast(const void* params) { return *static_cast<const Params*>(params); }

  const char* name_;
  std::vector<Candidate<Params>> candidates_;
  std::function<std::string(const Params&)> default_name_;
};

}  // namespace sd_ort
