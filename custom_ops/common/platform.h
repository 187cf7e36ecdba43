// Platform differences between Linux and Windows, except function export (interface.h): library names, loading and
// symbol lookup. Host code.
#pragma once

#include <exception>
#include <string>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
// after windows.h
#include <psapi.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#else
#include <dlfcn.h>
#include <link.h>
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
constexpr const char* kHipRuntimes[] = {"amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"};
constexpr const char* kHipPrefix = "amdhip64";
constexpr const char* kHipNames = "amdhip64_7.dll or amdhip64_6.dll";
constexpr const char* kHipAdvice = ": install AMD's driver or HIP SDK, or set HIP_PATH to its folder.";
#else
constexpr const char* kHipLibrary = "libsd_ort_hip.so";
constexpr const char* kCudaLibrary = "libsd_ort_cuda.so";
constexpr const char* kCudnn[] = {"libcudnn.so.9", "libcudnn.so.8", "libcudnn.so"};
constexpr const char* kCublasLt[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
constexpr const char* kHipblasLt[] = {"libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"};
constexpr const char* kHipRuntimes[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"};
constexpr const char* kHipPrefix = "libamdhip64.so";
constexpr const char* kHipNames = "libamdhip64.so.7, .6 or .5";
constexpr const char* kHipAdvice = ": install ROCm 6.4 or later, or set ROCM_PATH to its folder.";
#endif

// The variable with ROCm's folder, the libraries' folder below it, and the usual folder of these. Windows' drivers have
// the runtime in the system's folder.
#if defined(_WIN32)
constexpr const char* kRocmVariable = "HIP_PATH";
constexpr const char* kRocmLibraries = "/bin/";
constexpr const char* kRocmFolder = nullptr;
#else
constexpr const char* kRocmVariable = "ROCM_PATH";
constexpr const char* kRocmLibraries = "/lib/";
constexpr const char* kRocmFolder = "/opt/rocm/lib/";
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
  std::wstring path = wide(library);
  std::replace(path.begin(), path.end(), L'/', L'\\');
  const bool is_path = path.find(L'\\') != std::wstring::npos;  // what a library needs may lie beside it
  return reinterpret_cast<void*>(LoadLibraryExW(path.c_str(), nullptr, is_path ? LOAD_WITH_ALTERED_SEARCH_PATH : 0));
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

// Whether a library that did not load, with `error` of load_error(), is a file.
inline bool exists(const std::string& library, const std::string& error) {
#if defined(_WIN32)
  (void)error;
  const bool is_path = library.find_first_of("/\\") != std::string::npos;
  return is_path && GetFileAttributesW(wide(library).c_str()) != INVALID_FILE_ATTRIBUTES;
#else
  return error.find(library + ": cannot open") == std::string::npos;
#endif
}

// Returns the path of a loaded library.
inline std::string path_of(void* library) {
#if defined(_WIN32)
  std::wstring path(1 << 15, L'\0');
  path.resize(GetModuleFileNameW(static_cast<HMODULE>(library), path.data(), static_cast<DWORD>(path.size())));
  return narrow(path);
#else
  link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
#endif
}

// Returns the path of a library that the process has loaded and whose file name begins with `prefix`; "" without one.
inline std::string loaded_library(const std::string& prefix) {
  struct Search {
    const std::string& prefix;
    std::string path;
    bool matches(const std::string& candidate) {
      if (candidate.compare(candidate.find_last_of("/\\") + 1, prefix.size(), prefix) != 0) return false;
      path = candidate;
      return true;
    }
  } search{prefix, ""};
#if defined(_WIN32)
  HMODULE modules[1024];
  DWORD bytes = 0;
  if (!K32EnumProcessModules(GetCurrentProcess(), modules, sizeof(modules), &bytes)) return "";
  for (size_t i = 0; i < std::size(modules) && i < bytes / sizeof(HMODULE); ++i) {
    if (search.matches(path_of(modules[i]))) break;
  }
#else
  dl_iterate_phdr([](dl_phdr_info* info, size_t,
                     void* data) { return static_cast<Search*>(data)->matches(info->dlpi_name) ? 1 : 0; },
                  &search);
#endif
  return search.path;
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

// Keeps the library that contains a function until the process ends. Elsewhere its linker says so: CMakeLists.txt.
inline void keep_library(void (*function)()) {
#if defined(_WIN32)
  HMODULE library = nullptr;
  GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                     reinterpret_cast<const wchar_t*>(function), &library);
#else
  (void)function;
#endif
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
