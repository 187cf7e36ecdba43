// The types of HIP's functions, `t_hipMalloc` that of hipMalloc: of some there are overloads for C++, and compilers
// alone call others. Macros: __HIP_PLATFORM_AMD__.
#pragma once

#include <hip/hip_runtime_api.h>

using GLuint = unsigned;  // OpenGL's headers are not needed
using GLenum = unsigned;

#include <hip/amd_detail/amd_hip_gl_interop.h>
#include <hip/hip_deprecated.h>

#include <hip/amd_detail/hip_api_trace.hpp>
