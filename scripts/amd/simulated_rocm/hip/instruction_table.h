// Host functions of a kernel's instructions. instruction_compiler.py makes them; the cache folder keeps them.
#pragma once

#include "code_object.h"

namespace simulated {

// State of a wave that an instruction changes. The order is that of the emulator's arguments.
struct WaveState {
  void* scalar_registers;
  void* vector_registers;
  void* memory;  // null: addresses are host addresses
  void* lds;
  void* scratch;
  void* accumulation_registers;
};

using InstructionFunction = void (*)(void*, void*, void*, void*, void*, void*);

struct Instruction {
  InstructionFunction run = nullptr;  // null: no instruction begins here, or it cannot run
  uint8_t arguments[6] = {};          // indices into WaveState
  bool is_barrier = false, needs_lock = false;
};

struct InstructionTable {
  std::vector<Instruction> instructions;  // by offset / 4
  std::map<size_t, std::string> reasons;  // of instructions that cannot run, by offset
};

// The table of a kernel: from the cache, or made by the instruction compiler. Throws std::runtime_error.
std::shared_ptr<const InstructionTable> load_instruction_table(const KernelDescription& kernel);

// Counts and times for the report.
struct InstructionCompilerUse {
  uint64_t kernels = 0;
  double seconds = 0;
};
InstructionCompilerUse instruction_compiler_use();

}  // namespace simulated
