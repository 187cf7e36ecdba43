// Stands in for CUDA's header when a kernel is emulated.
#pragma once

using __half = _Float16;
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return static_cast<__half>(x); }
