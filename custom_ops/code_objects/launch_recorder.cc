// Stands in for the HIP runtime: a library of HIP kernels that finds these functions first does not launch, it reports
// its launches. recorded.py compiles and loads it; no GPU and no driver is needed.
//
// The functions are those that clang's host code for <<<...>>> calls (clang/lib/CodeGen/CGCUDANV.cpp), and
// hipGetLastError.
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace {

struct Dim3 {
  uint32_t x, y, z;
};
// The kernel's symbol in its code object, grid (3) and block (3), bytes of dynamic LDS, where each argument lies.
using Report = void (*)(const char* symbol, const uint32_t* sizes, size_t lds_bytes, void** arguments);

struct Configuration {
  Dim3 grid, block;
  size_t lds_bytes;
};

Report report = nullptr;
Configuration configuration{};

std::unordered_map<const void*, std::string>& symbols() {
  static std::unordered_map<const void*, std::string> all;
  return all;
}

}  // namespace

extern "C" {

void report_launches_to(Report function) { report = function; }

void** __hipRegisterFatBinary(const void*) {
  static void* handle = nullptr;
  return &handle;
}
void __hipUnregisterFatBinary(void**) {}
void __hipRegisterFunction(void**, const void* function, char*, const char* symbol, unsigned, void*, void*, void*,
                           void*, int*) {
  symbols()[function] = symbol;
}

int __hipPushCallConfiguration(Dim3 grid, Dim3 block, size_t lds_bytes, void*) {
  configuration = {grid, block, lds_bytes};
  return 0;
}
int __hipPopCallConfiguration(Dim3* grid, Dim3* block, size_t* lds_bytes, void** stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *lds_bytes = configuration.lds_bytes;
  *stream = nullptr;
  return 0;
}

int hipLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** arguments, size_t lds_bytes, void*) {
  const uint32_t sizes[6] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  report(symbols().at(function).c_str(), sizes, lds_bytes, arguments);
  return 0;
}
int hipGetLastError() { return 0; }
}
