// A captured graph made a straight line of kernels, as far as it can be, and ready on the device before it is launched.
// Included by tuner.cc and device.cc alone.
#pragma once

#include <vector>

#include "common/gpu.h"

namespace sd_ort {

#if SD_ORT_SIMULATED || SD_ORT_HIP || defined(SD_ORT_EMULATED)
inline void replace_memsets(SD_ORT_GPU_NAME(Graph_t)) {}  // nothing there is known to gain by it
template <class Graph, class Stream>
void send_ahead(Graph, Stream) {}
#else
// Of more than about a thousand kernels the driver sends some again at every launch, unless all were sent at once:
// SDXL's 1322 then take 54 us of the host, and 13 (H200, CUDA 13.0).
inline void send_ahead(cudaGraphExec_t graph, cudaStream_t stream) {
  (void)cudaGraphUpload(graph, stream);
  (void)cudaGetLastError();
}

template <class T>
__global__ void set_kernel(T* to, T value, uint32_t count) {
  wait_for_predecessor();
  const uint32_t i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) to[i] = value;
}

// The nodes before a node of a graph, or behind it.
inline cudaError_t neighbors(cudaGraphNode_t node, bool before, std::vector<cudaGraphNode_t>& found) {
  const auto get = [&](cudaGraphNode_t* nodes, size_t* count) {
    const auto of = before ? cudaGraphNodeGetDependencies : cudaGraphNodeGetDependentNodes;
#if CUDART_VERSION >= 13000
    return of(node, nodes, nullptr, count);
#else
    return of(node, nodes, count);
#endif
  };
  size_t count = 0;
  cudaError_t error = get(nullptr, &count);
  found.resize(count);
  if (error == cudaSuccess && count > 0) error = get(found.data(), &count);
  return error;
}

// A kernel in the place of a memset node of one row. An error leaves the graph as it was.
template <class T>
cudaError_t set_by_kernel(cudaGraph_t graph, cudaGraphNode_t node, const cudaMemsetParams& memset) {
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
  cudaGraphNode_t made = nullptr;
  error = cudaGraphAddKernelNode(&made, graph, before.data(), before.size(), &kernel);
  if (error != cudaSuccess) return error;
  const std::vector<cudaGraphNode_t> from(after.size(), made);
#if CUDART_VERSION >= 13000
  error = cudaGraphAddDependencies(graph, from.data(), after.data(), nullptr, after.size());
#else
  error = cudaGraphAddDependencies(graph, from.data(), after.data(), after.size());
#endif
  (void)cudaGraphDestroyNode(error == cudaSuccess ? node : made);
  return error;
}

// Makes the memset nodes of a captured graph, which cuBLASLt and cuDNN leave there, kernels. A graph of nothing
// but kernels in a line is launched in a few microseconds; each memset costs the host 1.5 to 3 and the device 3
// (H200, CUDA 13.0). What cannot be made one stays.
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
    if (memset.elementSize == 1) (void)set_by_kernel<uint8_t>(graph, node, memset);
    if (memset.elementSize == 2) (void)set_by_kernel<uint16_t>(graph, node, memset);
    if (memset.elementSize == 4) (void)set_by_kernel<uint32_t>(graph, node, memset);
  }
  (void)cudaGetLastError();
}
#endif

}  // namespace sd_ort
