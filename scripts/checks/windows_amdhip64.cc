// amdhip64_7.dll for Wine: functions of the simulated HIP runtime of Linux (scripts/amd/simulated_rocm) in the calling
// convention of Windows. FUNCTIONS is a file with a line FORWARD(name) for each.
#define __HIP_DISABLE_CPP_FUNCTIONS__  // overloads
#include <hip/hip_runtime_api.h>

namespace {

template <auto* kFunction>
struct Forward;
template <class Result, class... Arguments, Result (*kFunction)(Arguments...)>
struct Forward<kFunction> {
  static __attribute__((ms_abi)) Result call(Arguments... arguments) { return kFunction(arguments...); }
};

}  // namespace

extern "C" {

// Compilers call these, so that HIP's headers lack them.
void** __hipRegisterFatBinary(const void* binary);
void __hipRegisterFunction(void** module, const void* function, char* device_name, const char* name, unsigned threads,
                           void* thread, void* block, void* block_size, void* grid_size, int* wave_size);
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t lds_bytes, hipStream_t stream);
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* lds_bytes, hipStream_t* stream);

// The exported symbol windows_<name> jumps to the function, whose own symbol is that of a template.
#define FORWARD(name)                                                                                              \
  __attribute__((used, visibility("hidden"))) void* forward_##name = reinterpret_cast<void*>(Forward<name>::call); \
  asm(".text\n.globl windows_" #name "\nwindows_" #name ": jmp *forward_" #name "(%rip)");
#include FUNCTIONS
}
