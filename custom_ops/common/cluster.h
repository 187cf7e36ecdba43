// Blocks that run together on neighboring multiprocessors and see each other's shared memory: NVIDIA's thread-block
// clusters, compute capability 9 and newer. Device code; on older devices nothing here may be called. Copies to LDS
// that pass through no register are here too.
// Source: NVIDIA PTX ISA, "barrier.cluster", "mapa", "st.shared::cluster" and "cp.async".
#pragma once

#include "common/gpu.h"

#if SD_ORT_HAS_CLUSTERS
namespace sd_ort {

// The cluster's barrier in two halves: what a thread stored before its arrival, all see after their waiting.
__device__ inline void cluster_arrive() {
#if defined(SD_ORT_EMULATED)
  emulator::arrive_in_cluster();
#elif SD_ORT_CUDA_CODE >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if defined(SD_ORT_EMULATED)
  emulator::wait_for_cluster();
#elif SD_ORT_CUDA_CODE >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// *variable = value in the block of `rank`; `variable` is a __shared__ one as this block sees it.
__device__ inline void store_in_cluster(float2* variable, int rank, float2 value) {
#if defined(SD_ORT_EMULATED)
  memcpy(emulator::remote(variable, rank), &value, sizeof(value));
#elif SD_ORT_CUDA_CODE >= 900
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(variable))), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
#endif
}

// kBytes (4, 8 or 16) from global memory to LDS, there for this thread after wait_for_copies_but<n>(): all copies begun
// before the last n calls of end_of_copies().
template <int kBytes>
__device__ inline void copy_async(void* to, const void* from) {
#if defined(SD_ORT_EMULATED)
  memcpy(to, from, kBytes);
#elif SD_ORT_CUDA_CODE
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {  // past the first cache: nothing here is read twice
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(__cvta_generic_to_global(from))
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(__cvta_generic_to_global(from)),
                 "n"(kBytes)
                 : "memory");
  }
#endif
}
__device__ inline void end_of_copies() {
#if SD_ORT_CUDA_CODE
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kLeft>
__device__ inline void wait_for_copies_but() {
#if SD_ORT_CUDA_CODE
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Host: launch() in clusters of `cluster` neighboring blocks along x. Compute capability 9 and newer.
template <class... Parameters, class... Arguments>
const char* launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, int cluster, size_t lds_bytes,
                            void* stream, Arguments... arguments) {
#if defined(SD_ORT_EMULATED)
  emulator::launch(grid, block, cluster, lds_bytes, [=] { kernel(static_cast<Parameters>(arguments)...); });
#else
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(lds_bytes));
  if (cluster > 8) cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  launch_kernel(kernel, grid, block, cluster, lds_bytes, stream, static_cast<Parameters>(arguments)...);
#endif
  return launch_error();
}

#if !defined(SD_ORT_EMULATED)
// Host: whether the device runs a kernel in clusters of `cluster` blocks.
inline bool runs_cluster(const void* kernel, int cluster, int threads, int lds_bytes) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(cluster);
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = lds_bytes;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  int clusters = 0;
  const bool runs =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, lds_bytes) == cudaSuccess &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch) == cudaSuccess && clusters > 0;
  (void)cudaGetLastError();
  return runs;
}
#endif

}  // namespace sd_ort
#endif
