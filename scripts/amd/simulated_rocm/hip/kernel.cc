#include "kernel.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "settings.h"

namespace simulated {
namespace {

// Scalar registers, as the emulator numbers them. Operands 128 to 255 are constants.
constexpr unsigned kVcc = 106, kTtmp7 = 115, kTtmp9 = 117, kNull = 124, kExec = 126, kScc = 253, kPc = 256;
constexpr unsigned kScratchStride = 259, kScalarRegisters = 276, kVectorRegisters = 256;
constexpr uint64_t kEnd = ~uint64_t{0};    // program counter after s_endpgm
constexpr uint32_t kPattern = 0xA5A5A5A5;  // in registers and LDS that no kernel may rely on
constexpr size_t kPadding = 64;            // bytes after LDS and scratch memory, for reads in words

// Pointers at the start of a wave: bits of KernelDescription::properties, and scalar registers each takes.
enum Property : uint32_t { kPrivateBuffer = 1, kDispatch = 2, kQueue = 4, kKernarg = 8, kDispatchId = 16 };

// What a kernel can read of its launch through the dispatch pointer: HSA's kernel dispatch packet.
struct DispatchPacket {
  uint16_t header, dimensions, block[3], reserved;
  uint32_t grid[3], scratch_bytes, lds_bytes;
  uint64_t kernel, kernarg, reserved_2, signal;
};
static_assert(sizeof(DispatchPacket) == 64, "a kernel dispatch packet has 64 bytes");

struct Wave {
  std::vector<uint32_t> scalar, vector, accumulation;
  std::vector<uint8_t> scratch;
  bool is_done = false;

  uint64_t pc() const { return scalar[kPc] | uint64_t{scalar[kPc + 1]} << 32; }
  void set(unsigned index, uint64_t value) {
    scalar[index] = static_cast<uint32_t>(value);
    scalar[index + 1] = static_cast<uint32_t>(value >> 32);
  }
};

// The launch that a host thread runs, for the message of a memory fault.
thread_local const char* running_kernel = nullptr;
struct sigaction previous_action;

void report_fault(int signal, siginfo_t* info, void* context) {
  if (running_kernel != nullptr) {
    char text[1024];
    const int length = snprintf(text, sizeof text, "simulated HIP: memory access fault at %p by kernel %s\n",
                                info->si_addr, running_kernel);
    if (write(2, text, std::min<size_t>(length, sizeof text - 1)) < 0) return;
    running_kernel = nullptr;
    ::signal(SIGSEGV, SIG_DFL);
    return;  // the access faults again
  }
  if ((previous_action.sa_flags & SA_SIGINFO) != 0)
    previous_action.sa_sigaction(signal, info, context);
  else
    sigaction(SIGSEGV, &previous_action, nullptr);
}

void report_faults_of_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = report_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &previous_action);
  });
}

void set_constants(uint32_t* scalar) {
  for (uint32_t i = 0; i <= 64; ++i) scalar[128 + i] = i;
  for (uint32_t i = 0; i < 16; ++i) scalar[193 + i] = -(i + 1);
  const float floats[] = {0.5f, -0.5f, 1.0f, -1.0f, 2.0f, -2.0f, 4.0f, -4.0f, 0.15915494f};
  memcpy(scalar + 240, floats, sizeof floats);
}

// The blocks of one launch, of which each host thread runs some.
class Execution {
 public:
  Execution(const KernelDescription& kernel, const InstructionTable& table, const LaunchDimensions& dimensions,
            const uint8_t* kernarg)
      : kernel_(kernel), table_(table), dimensions_(dimensions), kernarg_(kernarg), wave_size_(settings().wave_size) {
    threads_ = dimensions.block.x * dimensions.block.y * dimensions.block.z;
    waves_ = (threads_ + wave_size_ - 1) / wave_size_;
    blocks_ = uint64_t{dimensions.grid.x} * dimensions.grid.y * dimensions.grid.z;
    const uint32_t grid[] = {dimensions.grid.x, dimensions.grid.y, dimensions.grid.z};
    const uint32_t block[] = {dimensions.block.x, dimensions.block.y, dimensions.block.z};
    for (int i = 0; i < 3; ++i) {
      packet_.block[i] = static_cast<uint16_t>(block[i]);
      packet_.grid[i] = grid[i] * block[i];
    }
    packet_.dimensions = 3;
    packet_.scratch_bytes = kernel.scratch_bytes;
    packet_.lds_bytes = lds_bytes();
    packet_.kernarg = reinterpret_cast<uint64_t>(kernarg);
  }

  void run() {
    const unsigned count = static_cast<unsigned>(std::min<uint64_t>(settings().threads, blocks_));
    std::vector<std::thread> others;
    for (unsigned i = 1; i < count; ++i) others.emplace_back([this] { run_blocks(); });
    run_blocks();
    for (std::thread& thread : others) thread.join();
  }

  uint64_t wave_instructions() const { return wave_instructions_; }
  uint64_t waves() const { return blocks_ * waves_; }

 private:
  uint32_t lds_bytes() const { return kernel_.lds_bytes + dimensions_.dynamic_lds_bytes; }

  void run_blocks() {
    running_kernel = kernel_.name.c_str();
    std::vector<Wave> waves(waves_);
    std::vector<uint8_t> lds;
    uint64_t executed = 0;
    for (uint64_t index; (index = next_block_++) < blocks_;) {
      const dim3& grid = dimensions_.grid;
      const dim3 block(index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y);
      lds.assign(lds_bytes() + kPadding, kPattern & 0xff);
      for (uint32_t i = 0; i < waves_; ++i) initialize(&waves[i], i, block);
      executed += run_block(&waves, lds.data());
    }
    wave_instructions_ += executed;
    running_kernel = nullptr;
  }

  void initialize(Wave* wave, uint32_t index, dim3 block) const {
    wave->is_done = false;
    wave->scalar.assign(kScalarRegisters, kPattern);
    wave->vector.assign(kVectorRegisters * wave_size_, kPattern);
    if (settings().isa == Isa::kCdna) wave->accumulation.assign(kVectorRegisters * wave_size_, kPattern);
    wave->scratch.assign(size_t{kernel_.scratch_bytes} * wave_size_ + kPadding, kPattern & 0xff);
    uint32_t* scalar = wave->scalar.data();
    set_constants(scalar);
    if (settings().isa != Isa::kCdna) scalar[kNull] = 0;
    scalar[kScc] = 0;
    scalar[kScratchStride] = kernel_.scratch_bytes;
    wave->set(kVcc, 0);
    const uint32_t lanes = std::min(wave_size_, threads_ - index * wave_size_);
    wave->set(kExec, lanes == 64 ? ~uint64_t{0} : (uint64_t{1} << lanes) - 1);
    wave->set(kPc, reinterpret_cast<uint64_t>(kernel_.code));
    set_pointers(wave);
    set_block(scalar, block);
    const dim3& size = dimensions_.block;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      const uint32_t thread = index * wave_size_ + lane;
      wave->vector[lane] = thread / (size.x * size.y) << 20 | thread / size.x % size.y << 10 | thread % size.x;
    }
  }

  void set_pointers(Wave* wave) const {
    unsigned next = (kernel_.properties & kPrivateBuffer) != 0 ? 4 : 0;
    if ((kernel_.properties & kDispatch) != 0) {
      wave->set(next, reinterpret_cast<uint64_t>(&packet_));
      next += 2;
    }
    if ((kernel_.properties & kQueue) != 0) next += 2;
    if ((kernel_.properties & kKernarg) != 0) wave->set(next, reinterpret_cast<uint64_t>(kernarg_));
  }

  void set_block(uint32_t* scalar, dim3 block) const {
    if (settings().isa == Isa::kRdna4) {
      scalar[kTtmp7] = (block.y & 0xffff) | block.z << 16;
      scalar[kTtmp9] = block.x;
      return;
    }
    unsigned next = kernel_.resources >> 1 & 31;  // after the registers with pointers
    const uint32_t index[] = {block.x, block.y, block.z};
    for (int i = 0; i < 3; ++i)
      if ((kernel_.resources >> (7 + i) & 1) != 0) scalar[next++] = index[i];
  }

  // Runs the waves in turn, each from barrier to barrier. Returns the count of wave instructions.
  uint64_t run_block(std::vector<Wave>* waves, uint8_t* lds) const {
    uint64_t executed = 0;
    for (uint32_t running = waves_; running > 0;) {
      for (Wave& wave : *waves) {
        if (wave.is_done) continue;
        executed += run_wave(&wave, lds);
        if (wave.is_done) --running;
      }
    }
    return executed;
  }

  uint64_t run_wave(Wave* wave, uint8_t* lds) const {
    void* accumulation = wave->accumulation.empty() ? wave->vector.data() : wave->accumulation.data();
    void* state[] = {wave->scalar.data(), wave->vector.data(), nullptr, lds, wave->scratch.data(), accumulation};
    const auto code = reinterpret_cast<uint64_t>(kernel_.code);
    const Instruction* instructions = table_.instructions.data();
    for (uint64_t executed = 0;; ++executed) {
      const uint64_t offset = wave->pc() - code;
      if (offset / 4 >= table_.instructions.size() || instructions[offset / 4].run == nullptr) {
        if (wave->pc() == kEnd) {
          wave->is_done = true;
          return executed;
        }
        fail_at(offset);
      }
      const Instruction& instruction = instructions[offset / 4];
      const uint8_t* a = instruction.arguments;
      if (instruction.needs_lock) {
        static std::mutex mutex;
        std::lock_guard<std::mutex> lock(mutex);
        instruction.run(state[a[0]], state[a[1]], state[a[2]], state[a[3]], state[a[4]], state[a[5]]);
      } else {
        instruction.run(state[a[0]], state[a[1]], state[a[2]], state[a[3]], state[a[4]], state[a[5]]);
      }
      if (instruction.is_barrier) return executed + 1;
    }
  }

  [[noreturn]] void fail_at(uint64_t offset) const {
    const auto reason = table_.reasons.find(offset);
    fail("kernel %s cannot run at offset %#lx: %s", kernel_.name.c_str(), offset,
         reason == table_.reasons.end() ? "no instruction of the kernel begins there" : reason->second.c_str());
  }

  const KernelDescription& kernel_;
  const InstructionTable& table_;
  const LaunchDimensions& dimensions_;
  const uint8_t* kernarg_;
  DispatchPacket packet_ = {};
  uint32_t wave_size_, threads_, waves_;
  uint64_t blocks_;
  std::atomic<uint64_t> next_block_{0}, wave_instructions_{0};
};

template <class T>
void store(std::vector<uint8_t>* kernarg, uint32_t offset, T value) {
  memcpy(kernarg->data() + offset, &value, sizeof value);
}

}  // namespace

hipError_t Kernel::check(const LaunchDimensions& dimensions) const {
  const dim3 &grid = dimensions.grid, &block = dimensions.block;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return hipErrorInvalidValue;
  if (block.x == 0 || block.y == 0 || block.z == 0) return hipErrorInvalidConfiguration;
  constexpr uint64_t kLargest = 0xffffffff;  // threads of a grid in each dimension
  if (uint64_t{grid.x} * block.x > kLargest || uint64_t{grid.y} * block.y > kLargest ||
      uint64_t{grid.z} * block.z > kLargest || grid.y > 65536 || grid.z > 65536)
    return hipErrorInvalidConfiguration;
  if (uint64_t{description_.lds_bytes} + dimensions.dynamic_lds_bytes > settings().lds_bytes)
    return hipErrorInvalidValue;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (block.x > 1024 || block.y > 1024 || block.z > 1024 || threads > 1024) return hipErrorInvalidValue;
  if (threads > description_.max_threads) {
    print_message("kernel %s was compiled for at most %u threads of a block, not %lu.", description_.name.c_str(),
                  description_.max_threads, threads);
    return hipErrorLaunchFailure;
  }
  return hipSuccess;
}

std::vector<uint8_t> Kernel::pack(const LaunchDimensions& dimensions, void* const* arguments) const {
  std::vector<uint8_t> kernarg(description_.kernarg_bytes + kPadding, kPattern & 0xff);
  for (size_t i = 0; i < description_.arguments.size(); ++i)
    memcpy(kernarg.data() + description_.arguments[i].offset, arguments[i], description_.arguments[i].bytes);
  pack_hidden(dimensions, &kernarg);
  return kernarg;
}

std::vector<uint8_t> Kernel::pack(const LaunchDimensions& dimensions, const void* buffer, size_t bytes) const {
  std::vector<uint8_t> kernarg(std::max<size_t>(description_.kernarg_bytes, bytes) + kPadding, kPattern & 0xff);
  memcpy(kernarg.data(), buffer, bytes);
  pack_hidden(dimensions, &kernarg);
  return kernarg;
}

void Kernel::pack_hidden(const LaunchDimensions& dimensions, std::vector<uint8_t>* kernarg) const {
  const dim3 &grid = dimensions.grid, &block = dimensions.block;
  const uint32_t blocks[] = {grid.x, grid.y, grid.z}, threads[] = {block.x, block.y, block.z};
  const uint16_t count = grid.z * block.z > 1 ? 3 : grid.y * block.y > 1 ? 2 : 1;
  for (const HiddenArgument& argument : description_.hidden_arguments) {
    const std::string& kind = argument.kind;
    const unsigned axis = kind.back() - 'x';
    memset(kernarg->data() + argument.offset, 0, argument.bytes);  // also buffers, queues, offsets and remainders
    if (kind.rfind("hidden_block_count_", 0) == 0) store(kernarg, argument.offset, blocks[axis]);
    if (kind.rfind("hidden_group_size_", 0) == 0) store(kernarg, argument.offset, static_cast<uint16_t>(threads[axis]));
    if (kind == "hidden_grid_dims") store(kernarg, argument.offset, count);
    if (kind == "hidden_dynamic_lds_size") store(kernarg, argument.offset, dimensions.dynamic_lds_bytes);
  }
}

void Kernel::run(const LaunchDimensions& dimensions, const std::vector<uint8_t>& kernarg) {
  KernelUse use;
  use.launches = 1;
  if (settings().kernels_run) {
    std::call_once(table_loaded_, [this] {
      if (description_.wave_size != settings().wave_size)
        fail("kernel %s has waves of %u lanes; only %u are simulated on %s.", description_.name.c_str(),
             description_.wave_size, settings().wave_size, settings().target.c_str());
      try {
        table_ = load_instruction_table(description_);
      } catch (const std::exception& error) {
        fail("kernel %s cannot run: %s", description_.name.c_str(), error.what());
      }
      report_faults_of_kernels();
    });
    const auto begin = std::chrono::steady_clock::now();
    Execution execution(description_, *table_, dimensions, kernarg.data());
    execution.run();
    use.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    use.waves = execution.waves();
    use.wave_instructions = execution.wave_instructions();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  use_.launches += use.launches;
  use_.waves += use.waves;
  use_.wave_instructions += use.wave_instructions;
  use_.seconds += use.seconds;
}

KernelUse Kernel::use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return use_;
}

}  // namespace simulated
