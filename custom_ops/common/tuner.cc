#include "common/tuner.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "common/capture.h"
#include "common/check.h"
#include "common/float8.h"
#include "common/gpu_graph.h"

namespace sd_ort {
namespace {

std::atomic<bool> replaces_memsets{false};  // Tuner::time_with_replaced_memsets

constexpr int kWarmUps = 3;
constexpr int kRuns = 20;
constexpr int kReplays = 3;
constexpr double kReplayMicroseconds = 4000;           // approximate duration of a replay in microseconds
constexpr double kSlowFactor = 2;                      // a candidate this much slower than the best is run once
constexpr double kFirstRunMicroseconds = 10000;        // more than a first run of ours takes to load its kernels
constexpr double kLaunchMicroseconds = 60;             // upper bound of the launch time on the host
constexpr size_t kComparedElements = size_t{1} << 22;  // approximate number of compared elements per output
constexpr size_t kPieceElements = 2048;                // of a large output's samples

const char* message(gpuError_t error) { return error == gpuSuccess ? nullptr : SD_ORT_GPU_NAME(GetErrorString)(error); }

// Device memory, freed on destruction.
class Buffer {
 public:
  explicit Buffer(size_t bytes) {
    if (bytes > 0) error_ = message(SD_ORT_GPU_NAME(Malloc)(&data_, bytes));
  }
  ~Buffer() {
    if (data_ != nullptr) (void)SD_ORT_GPU_NAME(Free)(data_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }
  const char* error() const { return error_; }

 private:
  void* data_ = nullptr;
  const char* error_ = nullptr;
};

float half_to_float(uint16_t bits) {
  // The exponent and fraction bits only need the difference of the biases, 127 - 15.
  const uint32_t magnitude = (bits & 0x7fffu) << 13 | ((bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u);
  float x;
  std::memcpy(&x, &magnitude, 4);
  if (std::isfinite(x)) x *= 0x1p112f;
  return bits & 0x8000 ? -x : x;
}

double value(const std::vector<char>& bytes, size_t i, DType dtype) {
  if (dtype == DType::kFloat8) return float8_to_float(static_cast<uint8_t>(bytes[i]));
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, &bytes[4 * i], 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, &bytes[2 * i], 2);
  if (dtype == DType::kFloat16) return half_to_float(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// Whether samples of an output are equal up to rounding: the normalized squared error is below the limit of the output,
// and NaN and Inf are at the same positions.
bool outputs_match(const std::vector<char>& actual, const std::vector<char>& expected, const Output& output) {
  const DType dtype = output.dtype;
  // In float8 a candidate's rounding error decides some of the elements between two numbers an eighth apart.
  const double rounding = dtype == DType::kFloat32   ? 1e-10
                          : dtype == DType::kFloat16 ? 1e-5
                          : dtype == DType::kFloat8  ? 2e-3
                                                     : 5e-4;
  const double limit = std::max(rounding, output.nmse);
  const size_t count = actual.size() / size_of(dtype);
  double error = 0, size = 0;
  for (size_t i = 0; i < count; ++i) {
    const double a = value(actual, i, dtype), b = value(expected, i, dtype);
    if (std::isnan(b) != std::isnan(a)) return false;
    if (std::isnan(b)) continue;
    if (std::isinf(a) || std::isinf(b)) {
      if (a != b) return false;
      continue;
    }
    error += (a - b) * (a - b);
    size += b * b;
  }
  return error <= limit * size;
}

using Copies = std::vector<std::vector<char>>;

// First elements and ends of an output's samples: one of a small output, which is all of it; else pieces an odd number
// of pieces apart, so that they lie everywhere in lines of a power of two, and the last piece.
std::vector<std::pair<size_t, size_t>> samples(size_t count) {
  const size_t step = count / kComparedElements | 1;
  if (step == 1) return {{0, count}};
  std::vector<std::pair<size_t, size_t>> pieces;
  for (size_t first = 0; first + kPieceElements < count; first += step * kPieceElements) {
    pieces.push_back({first, first + kPieceElements});
  }
  pieces.push_back({count - kPieceElements, count});
  return pieces;
}

// Copies samples of the outputs to the host, which takes a second for all of 2 GB.
const char* copy_outputs(const std::vector<Output>& outputs, gpuStream_t stream, Copies& copies) {
  copies.assign(outputs.size(), {});
  for (size_t k = 0; k < outputs.size(); ++k) {
    const Output& output = outputs[k];
    if (output.data == nullptr || output.count == 0) continue;
    const std::vector<std::pair<size_t, size_t>> pieces = samples(output.count);
    const size_t size = size_of(output.dtype);
    size_t at = 0;
    for (const auto& [first, end] : pieces) at += (end - first) * size;
    copies[k].resize(at);
    at = 0;
    for (const auto& [first, end] : pieces) {
      const size_t bytes = (end - first) * size;
      SD_ORT_RETURN_ERROR(message(SD_ORT_GPU_NAME(MemcpyAsync)(copies[k].data() + at,
                                                               static_cast<const char*>(output.data) + first * size,
                                                               bytes, SD_ORT_GPU_NAME(MemcpyDeviceToHost), stream)));
      at += bytes;
    }
  }
  return message(SD_ORT_GPU_NAME(StreamSynchronize)(stream));
}

// Outputs of the tuned call. If output 0 aliases an input, a copy of the input is restored before each checked run and
// at the end.
class Outputs {
 public:
  Outputs(std::vector<Output> all, const void* x, gpuStream_t stream)
      : all_(std::move(all)), stream_(stream), input_copy_(x != nullptr && all_[0].data == x ? bytes(all_[0]) : 0) {
    error_ = aliases_input() ? copy(input_copy_.data(), all_[0].data) : input_copy_.error();
  }
  ~Outputs() {
    if (!aliases_input()) return;
    (void)copy(all_[0].data, input_copy_.data());
    (void)SD_ORT_GPU_NAME(StreamSynchronize)(stream_);
  }
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;
  const std::vector<Output>& all() const { return all_; }
  bool aliases_input() const { return input_copy_.data() != nullptr; }
  const char* error() const { return error_; }

  // Restores the aliased input and fills other outputs with NaN, so that a candidate that writes nothing fails.
  const char* reset() const {
    for (size_t k = 0; k < all_.size(); ++k) {
      const Output& output = all_[k];
      if (output.data == nullptr || output.count == 0) continue;
      const bool is_input = k == 0 && aliases_input();
      SD_ORT_RETURN_ERROR(is_input ? copy(output.data, input_copy_.data())
                                   : message(SD_ORT_GPU_NAME(MemsetAsync)(output.data, 0xff, bytes(output), stream_)));
    }
    return nullptr;
  }

 private:
  static size_t bytes(const Output& output) { return output.count * size_of(output.dtype); }
  const char* copy(void* to, const void* from) const {
    return message(
        SD_ORT_GPU_NAME(MemcpyAsync)(to, from, bytes(all_[0]), SD_ORT_GPU_NAME(MemcpyDeviceToDevice), stream_));
  }

  std::vector<Output> all_;
  gpuStream_t stream_;
  Buffer input_copy_;
  const char* error_ = nullptr;
};

// Measures time with two events in a stream.
class Stopwatch {
 public:
  explicit Stopwatch(gpuStream_t stream) : stream_(stream) {
    error_ = message(SD_ORT_GPU_NAME(EventCreate)(&begin_));
    if (error_ == nullptr) error_ = message(SD_ORT_GPU_NAME(EventCreate)(&end_));
  }
  ~Stopwatch() {
    if (begin_ != nullptr) (void)SD_ORT_GPU_NAME(EventDestroy)(begin_);
    if (end_ != nullptr) (void)SD_ORT_GPU_NAME(EventDestroy)(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  // Sets the device time of the work that `work` queues.
  template <class Work>
  const char* time(const Work& work, double& microseconds) {
    float milliseconds = 0;
    SD_ORT_RETURN_ERROR(error_);
    SD_ORT_RETURN_ERROR(message(SD_ORT_GPU_NAME(EventRecord)(begin_, stream_)));
    SD_ORT_RETURN_ERROR(work());
    SD_ORT_RETURN_ERROR(message(SD_ORT_GPU_NAME(EventRecord)(end_, stream_)));
    SD_ORT_RETURN_ERROR(message(SD_ORT_GPU_NAME(EventSynchronize)(end_)));
    SD_ORT_RETURN_ERROR(message(SD_ORT_GPU_NAME(EventElapsedTime)(&milliseconds, begin_, end_)));
    microseconds = milliseconds * 1000.0;
    return nullptr;
  }

 private:
  gpuStream_t stream_;
  gpuEvent_t begin_ = nullptr, end_ = nullptr;
  const char* error_ = nullptr;
};

// Stream of the tuner: the caller's may be the default stream, which cannot be captured.
class TuningStream {
 public:
  TuningStream() {
    error_ = message(SD_ORT_GPU_NAME(StreamCreateWithFlags)(&stream_, SD_ORT_GPU_NAME(StreamNonBlocking)));
  }
  ~TuningStream() {
    if (stream_ != nullptr) (void)SD_ORT_GPU_NAME(StreamDestroy)(stream_);
  }
  TuningStream(const TuningStream&) = delete;
  TuningStream& operator=(const TuningStream&) = delete;
  gpuStream_t get() const { return stream_; }
  const char* error() const { return error_; }

 private:
  gpuStream_t stream_ = nullptr;
  const char* error_ = nullptr;
};

// `count` launches as a GPU graph, which excludes the launch time on the host.
class GraphReplay {
 public:
  template <class Launch>
  GraphReplay(const Launch& launch, int count, gpuStream_t stream) : stream_(stream) {
    SD_ORT_GPU_NAME(Graph_t) graph = nullptr;
    error_ = message(Captures::instance().begin(stream, [&] {
      return SD_ORT_GPU_NAME(StreamBeginCapture)(stream, SD_ORT_GPU_NAME(StreamCaptureModeRelaxed));
    }));
    if (error_ != nullptr) return;
    for (int i = 0; i < count && error_ == nullptr; ++i) error_ = launch();
    const char* const ended =
        message(Captures::instance().end(stream, [&] { return SD_ORT_GPU_NAME(StreamEndCapture)(stream, &graph); }));
    if (error_ == nullptr) error_ = ended;
    if (error_ == nullptr && replaces_memsets) replace_memsets(graph);
    if (error_ == nullptr) error_ = message(SD_ORT_GPU_NAME(GraphInstantiateWithFlags)(&graph_, graph, 0));
    if (graph != nullptr) (void)SD_ORT_GPU_NAME(GraphDestroy)(graph);
    (void)SD_ORT_GPU_NAME(GetLastError)();
  }
  ~GraphReplay() {
    if (graph_ != nullptr) (void)SD_ORT_GPU_NAME(GraphExecDestroy)(graph_);
  }
  GraphReplay(const GraphReplay&) = delete;
  GraphReplay& operator=(const GraphReplay&) = delete;
  // Error of the capture, or null.
  const char* error() const { return error_; }
  const char* run() const { return message(SD_ORT_GPU_NAME(GraphLaunch)(graph_, stream_)); }

 private:
  gpuStream_t stream_;
  SD_ORT_GPU_NAME(GraphExec_t) graph_ = nullptr;
  const char* error_ = nullptr;
};

// Measures microseconds per launch: the median of kReplays graph replays, or of kRuns launches if capture fails; of one
// launch if that takes more than kSlowFactor times `best`. The candidate has run before.
const char* measure(const GpuOp& op, int candidate, const void* params, void* workspace, gpuStream_t stream,
                    double best, double& microseconds) {
  const auto launch = [&] { return op.run(candidate, params, workspace, stream); };
  Stopwatch watch(stream);
  SD_ORT_RETURN_ERROR(watch.time(launch, microseconds));
  if (microseconds > kSlowFactor * best + kLaunchMicroseconds) return nullptr;
  const int count = std::max(1, std::min(kRuns, static_cast<int>(kReplayMicroseconds / std::max(microseconds, 1.0))));
  const GraphReplay replay(launch, count, stream);
  const bool captured = replay.error() == nullptr;
  for (int i = 0; i < (captured ? 1 : kWarmUps); ++i) SD_ORT_RETURN_ERROR(captured ? replay.run() : launch());
  std::vector<double> times(captured ? kReplays : kRuns);
  for (double& time : times) {
    SD_ORT_RETURN_ERROR(watch.time([&] { return captured ? replay.run() : launch(); }, time));
    if (captured) time /= count;
  }
  std::sort(times.begin(), times.end());
  microseconds = times[times.size() / 2];
  return nullptr;
}

// Runs candidate 0, the reference of the others, and sets the time of its first run.
const char* run_reference(const GpuOp& op, const void* params, const Outputs& outputs, gpuStream_t stream,
                          Copies& expected, double& microseconds) {
  if (!op.is_supported(0, params)) return "candidate 0 does not support the call";
  const Buffer workspace(op.workspace_bytes(0, params));
  SD_ORT_RETURN_ERROR(workspace.error());
  SD_ORT_RETURN_ERROR(outputs.reset());
  Stopwatch watch(stream);
  SD_ORT_RETURN_ERROR(watch.time([&] { return op.run(0, params, workspace.data(), stream); }, microseconds));
  return copy_outputs(outputs.all(), stream, expected);
}

// Runs and measures a candidate. Returns an error message if it fails, or if it is faster than `best` and wrong.
const char* try_candidate(const GpuOp& op, int candidate, const void* params, const Outputs& outputs,
                          const Copies& expected, gpuStream_t stream, double best, double& microseconds) {
  const Buffer workspace(op.workspace_bytes(candidate, params));
  SD_ORT_RETURN_ERROR(workspace.error());
  SD_ORT_RETURN_ERROR(outputs.reset());
  SD_ORT_RETURN_ERROR(op.run(candidate, params, workspace.data(), stream));
  SD_ORT_RETURN_ERROR(measure(op, candidate, params, workspace.data(), stream, best, microseconds));
  if (microseconds >= best) return nullptr;
  if (outputs.aliases_input()) {  // the measurement overwrote the input
    SD_ORT_RETURN_ERROR(outputs.reset());
    SD_ORT_RETURN_ERROR(op.run(candidate, params, workspace.data(), stream));
  }
  Copies actual;
  SD_ORT_RETURN_ERROR(copy_outputs(outputs.all(), stream, actual));
  for (size_t k = 0; k < expected.size(); ++k) {
    if (!expected[k].empty() && !outputs_match(actual[k], expected[k], outputs.all()[k])) return "wrong results";
  }
  return nullptr;
}

}  // namespace

void replace_memsets_of(void* graph) { replace_memsets(static_cast<SD_ORT_GPU_NAME(Graph_t)>(graph)); }

int current_device() {
  int device = 0;
  return SD_ORT_GPU_NAME(GetDevice)(&device) == gpuSuccess ? device : 0;
}

const float* device_number(float value) {
  static std::mutex mutex;
  static std::map<std::pair<int, float>, const float*> numbers;
  const std::pair<int, float> key = {current_device(), value};
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto entry = numbers.find(key);
    if (entry != numbers.end()) return entry->second;
  }
  const float* address = nullptr;
  Captures::instance().run_without([&] {
    std::lock_guard<std::mutex> lock(mutex);
    const float*& entry = numbers[key];
    const TuningStream stream;
    void* data = nullptr;
    if (entry == nullptr && stream.error() == nullptr && SD_ORT_GPU_NAME(Malloc)(&data, sizeof(value)) == gpuSuccess) {
      const bool written =
          SD_ORT_GPU_NAME(MemcpyAsync)(data, &value, sizeof(value), SD_ORT_GPU_NAME(MemcpyHostToDevice),
                                       stream.get()) == gpuSuccess &&
          SD_ORT_GPU_NAME(StreamSynchronize)(stream.get()) == gpuSuccess;
      if (written) entry = static_cast<const float*>(data);
    }
    address = entry;
  });
  return address;
}

std::string gpu_arch() {
  int device = 0;
  if (SD_ORT_GPU_NAME(GetDevice)(&device) != gpuSuccess) return "";
  gpuDeviceProp_t properties;
  if (SD_ORT_GPU_NAME(GetDeviceProperties)(&properties, device) != gpuSuccess) return "";
  return arch_name(properties);
}

std::string gpu_versions() {
  int driver = 0, runtime = 0;
  (void)SD_ORT_GPU_NAME(DriverGetVersion)(&driver);
  (void)SD_ORT_GPU_NAME(RuntimeGetVersion)(&runtime);
  return "driver " + std::to_string(driver) + " runtime " + std::to_string(runtime);
}

#if SD_ORT_HIP && !defined(SD_ORT_EMULATED)
const char* missing_runtime() { return missing_hip_runtime(); }
std::string runtime_path() { return hip_runtime_path(); }
#else
const char* missing_runtime() { return nullptr; }
std::string runtime_path() { return ""; }
#endif

Tuner& Tuner::instance() {
  static Tuner tuner;
  return tuner;
}

void Tuner::enable(bool enabled) {
  std::lock_guard<std::mutex> lock(mutex_);
  enabled_ = enabled;
}

void Tuner::time_with_replaced_memsets() { replaces_memsets = true; }

void Tuner::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  results_.clear();
}

void Tuner::set(const std::string& op, const std::string& signature, int candidate) {
  std::lock_guard<std::mutex> lock(mutex_);
  results_[{op, signature}].candidate = candidate;
}

int Tuner::choose(const GpuOp& op, const void* params, void* stream, const void* x) {
  bool tune_now = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (enabled_ || !results_.empty()) {
      const auto found = results_.find({op.name(), op.signature(params)});
      // Buffers may be less aligned than those of the tuned call; then the default runs.
      if (found != results_.end() && op.is_supported(found->second.candidate, params)) return found->second.candidate;
      tune_now = enabled_ && found == results_.end();
    }
  }
  if (tune_now && tune(op, params, stream, x).empty()) return choose(op, params, stream);
  const int fallback = op.default_candidate(params);
  return op.is_supported(fallback, params) ? fallback : op.is_supported(0, params) ? 0 : -1;
}

std::string Tuner::tune(const GpuOp& op, const void* params, void* caller, const void* x) {
  const TuningStream tuning_stream;
  const gpuStream_t stream = tuning_stream.get();
  Copies expected;
  double first_run = 0;
  const char* error = tuning_stream.error();
  if (error == nullptr) error = message(SD_ORT_GPU_NAME(StreamSynchronize)(static_cast<gpuStream_t>(caller)));
  if (error != nullptr) return std::string(op.name()) + ": " + error;
  const Outputs outputs(op.outputs(params), x, stream);
  error = outputs.error();
  if (error == nullptr) error = run_reference(op, params, outputs, stream, expected, first_run);
  if (error != nullptr) return std::string(op.name()) + ": " + op.candidate_name(0) + " fails: " + error;

  // The default first, so that much slower candidates run only once.
  const int fallback = op.default_candidate(params);
  std::vector<int> order = {fallback};
  for (int i = 0; i < op.candidate_count(); ++i) {
    if (i != fallback) order.push_back(i);
  }
  Result best;
  best.microseconds = INFINITY;
  std::map<int, std::pair<double, const char*>> rejected;  // candidate -> its microseconds and why it is not chosen
  for (int i : order) {
    if (!op.is_supported(i, params)) continue;
    // A generic kernel takes a second for a large convolution: it does not run twice more to be found slow again.
    if (i == 0 && first_run > kSlowFactor * best.microseconds + kFirstRunMicroseconds) continue;
    double microseconds = 0;
    error = try_candidate(op, i, params, outputs, expected, stream, best.microseconds, microseconds);
    if (i == fallback) best.default_microseconds = microseconds;
    if (error != nullptr) rejected[i] = {microseconds, error};
    if (error != nullptr || microseconds >= best.microseconds) continue;
    best.candidate = i;
    best.microseconds = microseconds;
  }
  if (best.candidate < 0) return std::string(op.name()) + ": no candidate could be timed";
  const std::string signature = op.signature(params);
  char times[64];
  std::snprintf(times, sizeof(times), "%.2f\t%.2f", best.microseconds, best.default_microseconds);
  best.line =
      std::string(op.name()) + "\t" + signature + "\t" + op.candidate_name(best.candidate) + "\t" + times + "\t";
  const char* separator = "";
  for (const auto& [candidate, time_and_reason] : rejected) {
    if (time_and_reason.first >= best.microseconds) continue;
    best.line += separator + std::string(op.candidate_name(candidate)) + ": " + time_and_reason.second;
    separator = "; ";
  }
  std::lock_guard<std::mutex> lock(mutex_);
  results_[{op.name(), signature}] = best;
  return "";
}

std::string Tuner::results() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string lines;
  for (const auto& entry : results_) {
    if (!entry.second.line.empty()) lines += entry.second.line + "\n";
  }
  return lines;
}

}  // namespace sd_ort
