// Runs GPU kernels on the host, for tests on machines without the GPU: each lane is a fiber, shared memory is static,
// barriers and cross-lane operations are meeting points of a block's or a wave's fibers. Compile the kernel's source
// with clang++ as C++, this folder before all others on the include path, -DSD_ORT_EMULATED and one of
//   -D__HIP_PLATFORM_AMD__ -D__GFX9__    CDNA, 64 lanes        -D__HIP_PLATFORM_AMD__ -D__GFX11__   RDNA3, 32 lanes
//   -D__HIP_PLATFORM_AMD__ -D__GFX12__   RDNA4, 32 lanes       -D__HIP_PLATFORM_AMD__ -D__gfx1030__ RDNA2, 32 lanes
//   (none)                               NVIDIA, 32 lanes
// The kernel's own code runs unchanged; hip/hip_runtime.h and cuda_runtime.h here stand in for the vendors' headers.
//
// Blocks run one after the other, but for those of a cluster, which take turns; each then has its own copy of the
// shared variables, swapped in for its turn.
//
// It also finds faults that hardware hides: lanes of one wave that meet in different operations, and reads of shared
// memory that nothing wrote (it holds NaN when a block starts).
#pragma once

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulator {

#if defined(__GFX9__)
constexpr int kWave = 64;
#else
constexpr int kWave = 32;
#endif
constexpr int kSlotBytes = 128;

// Bounds of the section that all __shared__ variables lie in.
extern "C" char __start_sd_ort_lds[] __attribute__((weak));
extern "C" char __stop_sd_ort_lds[] __attribute__((weak));

// A meeting point: everyone waits until `size` have come. Rounds are counted, two are open at most.
struct Meeting {
  long completed = 0;
  int arrived = 0;
  const char* operation = nullptr;
};

struct Wave {
  Meeting meeting;
  alignas(16) unsigned char given[2][kWave][kSlotBytes];
  alignas(16) unsigned char taken[2][kWave][kSlotBytes];
};

struct PendingCopy {
  void* to;
  unsigned char bytes[16];
  int group;
};

// A suspended flow of control, on its own stack.
#if defined(__x86_64__)
struct Context {
  void* top;  // of the stack, where the registers lie that a function preserves
};

// Suspends into `from` and resumes `to` (System V ABI). swapcontext also does a system call for the signal mask at
// every turn, which would be most of the emulator's time.
__attribute__((naked, noinline)) inline void switch_to(Context* /*from: rdi*/, Context* /*to: rsi*/) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq (%rsi), %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

inline void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16);
  top[-1] = nullptr;  // where entry would return to
  top[-2] = reinterpret_cast<void*>(entry);
  context.top = top - 8;  // six registers of any value below it
}
#else
struct Context {
  ucontext_t value;
};

inline void switch_to(Context* from, Context* to) { swapcontext(&from->value, &to->value); }

inline void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.value);
  context.value.uc_stack.ss_sp = stack;
  context.value.uc_stack.ss_size = bytes;
  context.value.uc_link = nullptr;
  makecontext(&context.value, entry, 0);
}
#endif

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  long wave_round = 0;
  long block_round = 0;
  long cluster_round = 0;
  std::vector<PendingCopy> copies;
  int copy_groups = 0;  // committed
};

struct Block {
  Context scheduler;
  std::vector<Fiber> fibers;
  std::vector<Wave> waves;
  Meeting barrier;
  dim3 index;
  int rank = 0;           // in the cluster
  std::vector<char> lds;  // its shared variables while other blocks have their turn
  std::vector<char> dynamic_lds;
  int current = 0;
};

// Of one cluster; usually a cluster is a block.
inline std::vector<Block> blocks;
inline Block* active = nullptr;
inline Meeting cluster_barrier;
inline std::function<void()> kernel;
inline long progress = 0;
inline dim3 grid_size, block_size;

[[noreturn]] inline void fail(const char* what, const char* detail = "") {
  std::fprintf(stderr, "emulator: %s %s (thread %d)\n", what, detail, active->current);
  std::abort();
}

inline Fiber& self() { return active->fibers[active->current]; }
inline void yield() { switch_to(&self().context, &active->scheduler); }

inline void fiber_main() {
  kernel();
  self().done = true;
  ++progress;
  yield();
}

// The last of `size` to come runs `combine`; then all go on.
template <class F>
void meet(Meeting& meeting, long& round, int size, const char* operation, F&& combine) {
  if (meeting.arrived == 0) meeting.operation = operation;
  if (std::strcmp(meeting.operation, operation) != 0) fail("lanes diverge at", operation);
  const long mine = round++;
  ++progress;
  if (++meeting.arrived == size) {
    combine();
    meeting.arrived = 0;
    ++meeting.completed;
  }
  while (meeting.completed <= mine) yield();
}

// Every lane gives an In and takes an Out; combine(const In*, Out*) sees those of the whole wave.
template <class Out, class In, class F>
Out exchange(const In& mine, const char* operation, F&& combine) {
  static_assert(sizeof(In) <= kSlotBytes && sizeof(Out) <= kSlotBytes);
  const int lane = active->current % kWave;
  Wave& wave = active->waves[active->current / kWave];
  long& round = self().wave_round;
  const int slot = round % 2;
  std::memcpy(wave.given[slot][lane], &mine, sizeof(mine));
  meet(wave.meeting, round, kWave, operation, [&] {
    In given[kWave];
    Out taken[kWave];
    for (int i = 0; i < kWave; ++i) std::memcpy(&given[i], wave.given[slot][i], sizeof(In));
    combine(given, taken);
    for (int i = 0; i < kWave; ++i) std::memcpy(wave.taken[slot][i], &taken[i], sizeof(Out));
  });
  Out result;
  std::memcpy(&result, wave.taken[slot][lane], sizeof(result));
  return result;
}

inline void synchronize() {
  meet(active->barrier, self().block_round, static_cast<int>(active->fibers.size()), "__syncthreads", [] {});
}

// The cluster's barrier, in two halves.
inline void arrive_in_cluster() {
  ++progress;
  ++self().cluster_round;
  if (++cluster_barrier.arrived == static_cast<int>(blocks.size() * active->fibers.size())) {
    cluster_barrier.arrived = 0;
    ++cluster_barrier.completed;
  }
}
inline void wait_for_cluster() {
  while (cluster_barrier.completed < self().cluster_round) yield();
}

// Where the block of `rank` in this cluster has its copy of a shared variable.
inline char* remote(void* variable, int rank) {
  char* here = static_cast<char*>(variable);
  if (here < __start_sd_ort_lds || here >= __stop_sd_ort_lds) fail("no static shared variable");
  return rank == active->rank ? here : blocks[rank].lds.data() + (here - __start_sd_ort_lds);
}

// Dynamic shared memory starts at a multiple of 1024 bytes, at address 0 of the shared space.
inline char* dynamic_lds() {
  const auto address = reinterpret_cast<uintptr_t>(active->dynamic_lds.data());
  return reinterpret_cast<char*>((address + 1023) / 1024 * 1024);
}

// cp.async of this thread: copies arrive when it waits for all groups of them except the last `pending` committed ones.
inline void commit_copies() { ++self().copy_groups; }
inline void wait_for_copies(int pending) {
  auto& copies = self().copies;
  while (!copies.empty() && copies.front().group < self().copy_groups - pending) {
    std::memcpy(copies.front().to, copies.front().bytes, sizeof(copies.front().bytes));
    copies.erase(copies.begin());
  }
}

template <class V>
V shuffle_from(V value, int source) {
  struct Given {
    V value;
    int source;
  };
  return exchange<V>(Given{value, source}, "shuffle", [](const Given* given, V* taken) {
    for (int i = 0; i < kWave; ++i) taken[i] = given[given[i].source % kWave].value;
  });
}

inline void start(Block& block, size_t lds_bytes) {
  constexpr size_t kStack = 256 * 1024;
  const int threads = static_cast<int>(block_size.x);
  if (threads % kWave != 0) fail("the block is no whole number of waves");
  block.fibers.resize(threads);
  block.waves.assign(threads / kWave, Wave{});
  block.barrier = {};
  const size_t size = __start_sd_ort_lds == nullptr ? 0 : __stop_sd_ort_lds - __start_sd_ort_lds;
  if (blocks.size() > 1) block.lds.assign(size, '\xff');
  if (blocks.size() == 1 && size > 0) std::memset(__start_sd_ort_lds, 0xff, size);
  block.dynamic_lds.assign(lds_bytes + 1024, '\xff');
  for (Fiber& fiber : block.fibers) {
    if (fiber.stack == nullptr) fiber.stack.reset(new char[kStack]);
    fiber.done = false;
    fiber.wave_round = fiber.block_round = fiber.cluster_round = 0;
    fiber.copies.clear();
    prepare(fiber.context, fiber.stack.get(), kStack, fiber_main);
  }
}

// One turn for every thread of a block; how many are not done yet.
inline int run_turn(Block& block) {
  active = &block;
  const bool alone = blocks.size() == 1;
  if (!alone) std::memcpy(__start_sd_ort_lds, block.lds.data(), block.lds.size());
  int left = 0;
  for (block.current = 0; block.current < static_cast<int>(block.fibers.size()); ++block.current) {
    if (self().done) continue;
    ++left;
    switch_to(&block.scheduler, &self().context);
  }
  if (!alone) std::memcpy(block.lds.data(), __start_sd_ort_lds, block.lds.size());
  return left;
}

inline void run_cluster() {
  cluster_barrier = {};
  for (int left = 1; left > 0;) {
    const long before = progress;
    left = 0;
    for (Block& block : blocks) left += run_turn(block);
    if (left > 0 && progress == before) fail("deadlock: some threads wait where others never come");
  }
}

// Runs kernel() for every thread of every block; clusters lie along x.
inline void launch(dim3 grid, dim3 threads, unsigned cluster, size_t lds_bytes, std::function<void()> to_run) {
  grid_size = grid;
  block_size = threads;
  kernel = std::move(to_run);
  blocks.resize(cluster);
  active = &blocks[0];
  if (grid.x % cluster != 0) fail("the grid is no whole number of clusters");
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += cluster) {
        for (unsigned rank = 0; rank < cluster; ++rank) {
          blocks[rank].index = dim3(x + rank, y, z);
          blocks[rank].rank = static_cast<int>(rank);
          start(blocks[rank], lds_bytes);
        }
        run_cluster();
      }
    }
  }
}

}  // namespace emulator

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ __attribute__((section("sd_ort_lds"), used)) static
#define threadIdx dim3(emulator::active->current, 0, 0)
#define blockIdx emulator::active->index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

#define __grid_constant__

inline void __syncthreads() { emulator::synchronize(); }
inline void __syncwarp() {
  emulator::exchange<int>(0, "__syncwarp", [](const int*, int* taken) {
    for (int i = 0; i < emulator::kWave; ++i) taken[i] = 0;
  });
}
inline uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
template <class V>
V __shfl_xor(V value, int mask, int = emulator::kWave) {
  return emulator::shuffle_from(value, (emulator::active->current % emulator::kWave) ^ mask);
}
template <class V>
V __shfl(V value, int lane, int = emulator::kWave) {
  return emulator::shuffle_from(value, lane);
}
template <class V>
V __shfl_xor_sync(unsigned, V value, int mask) {
  return __shfl_xor(value, mask);
}
template <class V>
V __shfl_sync(unsigned, V value, int lane) {
  return __shfl(value, lane);
}
inline int __any_sync(unsigned, int predicate) {
  return emulator::exchange<int>(predicate, "__any_sync", [](const int* lanes, int* results) {
    const bool any = std::any_of(lanes, lanes + emulator::kWave, [](int lane) { return lane != 0; });
    std::fill(results, results + emulator::kWave, any);
  });
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
