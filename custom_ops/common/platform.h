// Platform differences between Linux and Windows, except function export (interface.h): library names, loading and
// symbol lookup. Host code.
#pragma once

#include <exception>
#include <string>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>

#include <system_error>
#else
#include <dlfcn.h>
#endif

#include "interface.h"

#define SD_ORT_EXPORT extern "C" SD_ORT_API

namespace sd_ort {

// Runs work() and returns 0, or 1 if it throws.
template <class Work>
int status_of(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

}  // namespace sd_ort

namespace sd_ort::platform {

// File names of sd-ort libraries, and of vendor libraries by version, newest first.
#if defined(_WIN32)
constexpr const char* kHipLibrary = "libsd_ort_hip.dll";
constexpr const char* kCudaLibrary = "libsd_ort_cuda.dll";
constexpr const char* kCudnn[] = {"cudnn64_9.dll", "cudnn64_8.dll"};
constexpr const char* kCublasLt[] = {"cublasLt64_13.dll", "cublasLt64_12.dll"};
constexpr const char* kHipblasLt[] = {"libhipblaslt.dll", "hipblaslt.dll"};
#else
constexpr const char* kHipLibrary = "libsd_ort_hip.so";
constexpr const char* kCudaLibrary = "libsd_ort_cuda.so";
constexpr const char* kCudnn[] = {"libcudnn.so.9", "libcudnn.so.8", "libcudnn.so"};
constexpr const char* kCublasLt[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
constexpr const char* kHipblasLt[] = {"libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"};
#endif

#if defined(_WIN32)
inline std::wstring wide(const std::string& text) {
  std::wstring converted(MultiByteToWideChar(CP_UTF8, 0, text.data(), static_cast<int>(text.size()), nullptr, 0),
                         L'\0');
  MultiByteToWideChar(CP_UTF8, 0, text.data(), static_cast<int>(text.size()), converted.data(),
                      static_cast<int>(converted.size()));
  return converted;
}
inline std::string narrow(const std::wstring& text) {
  const int count = static_cast<int>(text.size());
  std::string converted(WideCharToMultiByte(CP_UTF8, 0, text.data(), count, nullptr, 0, nullptr, nullptr), '\0');
  WideCharToMultiByte(CP_UTF8, 0, text.data(), count, converted.data(), static_cast<int>(converted.size()), nullptr,
                      nullptr);
  return converted;
}
#endif

// Loads a library by path or by name (UTF-8); it stays loaded until the process ends. Returns null on failure;
// load_error() then returns the reason, on this thread.
inline void* load(const std::string& library) {
#if defined(_WIN32)
  return reinterpret_cast<void*>(LoadLibraryW(wide(library).c_str()));
#else
  return dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
#endif
}

inline std::string load_error() {
#if defined(_WIN32)
  const int error = static_cast<int>(GetLastError());
  return "error " + std::to_string(error) + ", " + std::system_category().message(error);
#else
  const char* error = dlerror();
  return error == nullptr ? "no error" : error;
#endif
}

// Loads the first of several libraries that exists; returns null if none does.
template <size_t kCount>
void* load_first(const char* const (&libraries)[kCount]) {
  for (const char* library : libraries) {
    if (void* loaded = load(library)) return loaded;
  }
  return nullptr;
}

// Sets `function` to the symbol `name` of the library; returns whether it exists.
template <class Function>
bool find(void* library, const std::string& name, Function*& function) {
#if defined(_WIN32)
  void* const symbol = reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name.c_str()));
#else
  void* const symbol = dlsym(library, name.c_str());
#endif
  function = reinterpret_cast<Function*>(symbol);
  return function != nullptr;
}

// Returns the folder, with a trailing separator, of the library that contains a function; "" if unknown.
inline std::string folder_of(void (*function)()) {
#if defined(_WIN32)
  HMODULE library = nullptr;
  std::wstring path(1 << 15, L'\0');  // the maximum length
  if (!GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                          reinterpret_cast<const wchar_t*>(function), &library)) {
    return "";
  }
  path.resize(GetModuleFileNameW(library, path.data(), static_cast<DWORD>(path.size())));
  return narrow(path.substr(0, path.find_last_of(L"\\/") + 1));
#else
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(function), &info) == 0) return "";
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
#endif
}

}  // namespace sd_ort::platform
