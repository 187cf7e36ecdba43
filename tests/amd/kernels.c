// Kernels of test_simulated_hip.py, compiled by clang without HIP's headers.
#define KERNEL __attribute__((amdgpu_kernel)) __attribute__((visibility("protected")))
#define GLOBAL __attribute__((address_space(1)))
#define LDS __attribute__((address_space(3)))

static unsigned thread_index(void) {
  return __builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() + __builtin_amdgcn_workitem_id_x();
}

// x[i] += value, for i below count.
KERNEL void add(GLOBAL float* x, float value, unsigned count) {
  const unsigned i = thread_index();
  if (i < count) x[i] += value;
}

// Each block of 64 threads reverses its elements through LDS.
KERNEL void reverse(GLOBAL unsigned* x) {
  static LDS __attribute__((loader_uninitialized)) unsigned shared[256];
  const unsigned lane = __builtin_amdgcn_workitem_id_x(), size = __builtin_amdgcn_workgroup_size_x();
  shared[lane] = x[thread_index()];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  x[thread_index()] = shared[size - 1 - lane];
}

// Block i adds 1 to each of its halves, which share words with those of its neighbors, a number of times.
KERNEL void count_in_halves(GLOBAL unsigned short* x, unsigned times) {
  for (unsigned i = 0; i < times; ++i) {
    const unsigned short value = __atomic_load_n(&x[__builtin_amdgcn_workgroup_id_x()], __ATOMIC_RELAXED);
    __atomic_store_n(&x[__builtin_amdgcn_workgroup_id_x()], (unsigned short)(value + 1), __ATOMIC_RELAXED);
  }
}

KERNEL void add_atomically(GLOBAL unsigned* sum) { __atomic_fetch_add(sum, 1u, __ATOMIC_RELAXED); }
