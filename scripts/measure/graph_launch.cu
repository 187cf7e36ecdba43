// Host and device time of replaying a captured line of kernels, with memsets in it and with those made kernels by
// custom_ops/common/graph.h, as our provider's graphs are. On an NVIDIA GPU:
//
//     nvcc -arch=sm_90 -O2 -std=c++17 -Icustom_ops scripts/measure/graph_launch.cu -o graph_launch && ./graph_launch
//
// The counts are those of a step of SD 1.5 and of SDXL. Least of 20 rounds; the host's time is that of one
// cudaGraphLaunch on an idle device.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/graph.h"

namespace {

constexpr int kCounters = 64;  // bytes that a memset zeroes

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

double now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds one everywhere, and leaves a number where the memsets write.
__global__ void work(float* sums, unsigned char* counters) {
  sums[blockIdx.x * blockDim.x + threadIdx.x] += 1.f;
  if (blockIdx.x == 0 && threadIdx.x < kCounters) counters[threadIdx.x] += 1;
}

cudaGraph_t capture(cudaStream_t stream, int kernels, int memsets, float* sums, unsigned char* counters) {
  cudaGraph_t graph;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "begin");
  for (int i = 0; i < kernels; ++i) {
    if (memsets > 0 && i % (kernels / memsets) == 0 && i / (kernels / memsets) < memsets) {
      check(cudaMemsetAsync(counters, 0, kCounters, stream), "memset");
    }
    work<<<64, 128, 0, stream>>>(sums, counters);
  }
  check(cudaStreamEndCapture(stream, &graph), "end");
  return graph;
}

int memset_nodes(cudaGraph_t graph) {
  size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
  int found = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    check(cudaGraphNodeGetType(node, &type), "type");
    found += type == cudaGraphNodeTypeMemset;
  }
  return found;
}

void measure(int kernels, int memsets, bool replace) {
  float* sums;
  unsigned char* counters;
  cudaStream_t stream;
  check(cudaMalloc(&sums, 64 * 128 * sizeof(float)), "memory");
  check(cudaMalloc(&counters, kCounters), "memory");
  check(cudaMemset(sums, 0, 64 * 128 * sizeof(float)), "zeros");
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const cudaGraph_t graph = capture(stream, kernels, memsets, sums, counters);
  if (replace) sd_ort::replace_memsets(graph);
  cudaGraphExec_t made;
  check(cudaGraphInstantiate(&made, graph, 0), "instantiate");
  check(cudaDeviceSynchronize(), "wait");
  double host = 1e9, whole = 1e9;
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    const double begun = now();
    check(cudaGraphLaunch(made, stream), "launch");
    const double launched = now();
    check(cudaStreamSynchronize(stream), "wait");
    host = std::min(host, launched - begun);
    whole = std::min(whole, now() - begun);
  }
  float sum = 0;
  unsigned char counter = 0;
  check(cudaMemcpy(&sum, sums + 64 * 128 - 1, sizeof(sum), cudaMemcpyDefault), "read");
  check(cudaMemcpy(&counter, counters + kCounters - 1, 1, cudaMemcpyDefault), "read");
  const int since = memsets == 0 ? kRounds * kernels : kernels - (memsets - 1) * (kernels / memsets);
  const bool right = sum == static_cast<float>(kRounds * kernels) && counter == static_cast<unsigned char>(since);
  std::printf("%5d kernels, %3d memsets, %3d of them left: host %6.1f us, run %7.1f us, %s\n", kernels, memsets,
              memset_nodes(graph), host, whole, memsets == 0 || right ? "right" : "WRONG");
}

}  // namespace

int main() {
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "driver");
  check(cudaRuntimeGetVersion(&runtime), "runtime");
  std::printf("driver %d, runtime %d\n", driver, runtime);
  for (const auto& [kernels, memsets] : {std::pair{408, 25}, std::pair{1014, 236}}) {
    measure(kernels, 0, false);
    measure(kernels, memsets, false);
    measure(kernels, memsets, true);
  }
}
