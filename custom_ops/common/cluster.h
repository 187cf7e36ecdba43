// Thread-block clusters of NVIDIA GPUs (compute capability 9 and newer): blocks on neighboring multiprocessors that
// access each other's shared memory; and asynchronous copies to LDS. Device code; must not be called on older devices.
// Source: NVIDIA PTX ISA, "barrier.cluster", "mapa", "st.shared::cluster" and "cp.async".
#pragma once

#include "common/gpu.h"

#if SD_ORT_HAS_CLUSTERS
namespace sd_ort {

// Split barrier of the cluster: stores before the arrival are visible to all threads after the wait.
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

// Stores *variable = value in block `rank` of the cluster; `variable` is a __shared__ variable of this block.
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

// Copies kBytes (4, 8 or 16) from global memory to LDS. The data is visible to this thread after wait_for_copies<n>(),
// which waits for all copies before the last n calls of commit_copies().
template <int kBytes>
__device__ inline void copy_async(void* to, const void* from) {
#if defined(SD_ORT_EMULATED)
  memcpy(to, from, kBytes);
#elif SD_ORT_CUDA_CODE
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {  // bypasses the L1 cache: nothing is read twice
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(__cvta_generic_to_global(from))
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(__cvta_generic_to_global(from)),
                 "n"(kBytes)
                 : "memory");
  }
#endif
}
__device__ inline void commit_copies() {
#if defined(SD_ORT_EMULATED)
  emulator::commit_copies();
#elif SD_ORT_CUDA_CODE
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ inline void wait_for_copies() {
#if defined(SD_ORT_EMULATED)
  emulator::wait_for_copies(kPending);
#elif SD_ORT_CUDA_CODE
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Host: launch() in clusters of `cluster` adjacent blocks along x. Compute capability 9 and newer.
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
// Host: whether the device can run a kernel in clusters of `cluster` blocks.
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
