// Optimization of captured GPU graphs: memset nodes become kernels, and the graph is uploaded before its first launch.
// Included only by tuner.cc and device.cc.
#pragma once

#include <vector>

#include "common/gpu.h"

namespace sd_ort {

#if SD_ORT_SIMULATED || SD_ORT_HIP || defined(SD_ORT_EMULATED)
inline void replace_memsets(SD_ORT_GPU_NAME(Graph_t)) {}  // no known benefit
template <class Graph, class Stream>
void upload_graph(Graph, Stream) {}
#else
// Uploads all nodes at once. Without it the driver sends part of a graph of more than about 1000 kernels at every
// launch: SDXL's 1322 take 54 us of host time, 13 us with it (H200, CUDA 13.0).
inline void upload_graph(cudaGraphExec_t graph, cudaStream_t stream) {
  (void)cudaGraphUpload(graph, stream);
  (void)cudaGetLastError();
}

template <class T>
__global__ void set_kernel(T* to, T value, uint32_t count) {
  wait_for_predecessor();
  const uint32_t i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) to[i] = value;
}

// Sets `nodes` to the predecessors or the successors of a node.
inline cudaError_t neighbors(cudaGraphNode_t node, bool predecessors, std::vector<cudaGraphNode_t>& nodes) {
  const auto get = [&](cudaGraphNode_t* to, size_t* count) {
    const auto list = predecessors ? cudaGraphNodeGetDependencies : cudaGraphNodeGetDependentNodes;
#if CUDART_VERSION >= 13000
    return list(node, to, nullptr, count);
#else
    return list(node, to, count);
#endif
  };
  size_t count = 0;
  cudaError_t error = get(nullptr, &count);
  nodes.resize(count);
  if (error == cudaSuccess && count > 0) error = get(nodes.data(), &count);
  return error;
}

// Replaces a memset node of one row by a kernel node. On error the graph is unchanged.
template <class T>
cudaError_t replace_by_kernel(cudaGraph_t graph, cudaGraphNode_t node, const cudaMemsetParams& memset) {
  std::vector<cudaGraphNode_t> before, after;
  cudaError_t error = neighbors(node, true, before);
  if (error == cudaSuccess) error = neighbors(node, false, after);
  if (error != cudaSuccess) return error;
  T* to = static_cast<T*>(memset.dst);
  T value = static_cast<T>(memset.value);
  uint32_t count = static_cast<uint32_t>(memset.width);
  void* arguments[] = {&to, &value, &count};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(set_kernel<T>);
  kernel.gridDim = dim3((count + 255) / 256);
  kernel.blockDim = dim3(256);
  kernel.kernelParams = arguments;
  cudaGraphNode_t replacement = nullptr;
  error = cudaGraphAddKernelNode(&replacement, graph, before.data(), before.size(), &kernel);
  if (error != cudaSuccess) return error;
  const std::vector<cudaGraphNode_t> from(after.size(), replacement);
#if CUDART_VERSION >= 13000
  error = cudaGraphAddDependencies(graph, from.data(), after.data(), nullptr, after.size());
#else
  error = cudaGraphAddDependencies(graph, from.data(), after.data(), after.size());
#endif
  (void)cudaGraphDestroyNode(error == cudaSuccess ? node : replacement);
  return error;
}

// Replaces memset nodes of a captured graph, which cuBLASLt and cuDNN create, by kernels. A linear graph of kernels is
// launched in a few microseconds; each memset costs 1.5 to 3 us of host and 3 us of device time (H200, CUDA 13.0).
// Unsupported memset nodes stay.
inline void replace_memsets(cudaGraph_t graph) {
  size_t count = 0;
  if (cudaGraphGetNodes(graph, nullptr, &count) != cudaSuccess) count = 0;
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0 && cudaGraphGetNodes(graph, nodes.data(), &count) != cudaSuccess) nodes.clear();
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    cudaMemsetParams memset;
    if (cudaGraphNodeGetType(node, &type) != cudaSuccess || type != cudaGraphNodeTypeMemset) continue;
    if (cudaGraphMemsetNodeGetParams(node, &memset) != cudaSuccess) continue;
    if (memset.height != 1 || memset.width == 0 || memset.width > INT32_MAX) continue;
    if (memset.elementSize == 1) (void)replace_by_kernel<uint8_t>(graph, node, memset);
    if (memset.elementSize == 2) (void)replace_by_kernel<uint16_t>(graph, node, memset);
    if (memset.elementSize == 4) (void)replace_by_kernel<uint32_t>(graph, node, memset);
  }
  (void)cudaGetLastError();
}
#endif

}  // namespace sd_ort
