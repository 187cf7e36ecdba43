// windows_hip.exe [DLL]: prints the HIP runtime that the libraries for AMD would use on Windows, or what they say
// without one, and what hipGetDeviceCount returned. DLL: a library that the process loads first.
#include <windows.h>

#include <cstdio>

#include "common/vendors/hip_runtime.h"

int main(int count, char** arguments) {
  if (count > 1 && LoadLibraryA(arguments[1]) == nullptr) return 2;
  const char* const missing = sd_ort::missing_hip_runtime();
  int devices = -1;
  const int error = sd_ort::hipGetDeviceCount(&devices);
  std::printf("%s\n%d %d\n", missing == nullptr ? sd_ort::hip_runtime_path().c_str() : missing, error, devices);
  return 0;
}
