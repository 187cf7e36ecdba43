// Kernels that copy elements as raw bits, with the widest accesses that are contiguous on both sides.
#include "provider/kernels/for_each.h"
#include "provider/kernels/kernels.h"
#include "provider/kernels/move.h"

namespace sd_ort {
namespace {

using Bits128 = FourRegisters;  // clang 22 keeps an array of structures in memory

template <class T>
struct Copy {
  StridedCopy c;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    int64_t from = 0, to = 0;
    for (int axis = c.axes - 1; axis >= 0; --axis) {
      const uint32_t size = static_cast<uint32_t>(c.sizes[axis]), at = i % size;
      i /= size;
      from += at * c.from_strides[axis];
      to += at * c.to_strides[axis];
    }
    static_cast<T*>(c.to)[to] = static_cast<const T*>(c.from)[from];
  }
};

template <class T>
struct ConcatParts {
  ConcatCall c;
  Divisor span;  // columns of all parts
  SD_ORT_DEVICE Move<T> operator()(uint32_t i) const {
    const uint32_t row = span.divide(i), before = row * static_cast<uint32_t>(c.begins[c.count] - c.begins[0]);
    const int32_t column = static_cast<int32_t>(i - before) + c.begins[0];
    int part = 0;
    while (column >= c.begins[part + 1]) ++part;
    const int32_t begin = c.begins[part], width = c.begins[part + 1] - begin;
    T* const in_part = static_cast<T*>(c.parts[part]) + static_cast<int64_t>(row) * width + (column - begin);
    T* const in_full = static_cast<T*>(c.full) + static_cast<int64_t>(row) * c.width + column;
    return {c.split ? in_full : in_part, c.split ? in_part : in_full, c.parts[part] != nullptr};
  }
};

template <class T>
struct Fill {
  T* to;
  T value;
  SD_ORT_DEVICE void operator()(uint32_t i) const { to[i] = value; }
};

template <class T>
struct Gather {
  GatherCall c;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const uint32_t inner = static_cast<uint32_t>(c.inner), count = static_cast<uint32_t>(c.count);
    const uint32_t column = i % inner, row = i / inner % count;
    const int64_t outer = i / inner / count;
    int64_t index =
        c.int64_indices ? static_cast<const int64_t*>(c.indices)[row] : static_cast<const int32_t*>(c.indices)[row];
    if (index < 0) index += c.size;
    const bool inside = index >= 0 && index < c.size;  // undefined in ONNX; never read out of bounds
    static_cast<T*>(c.to)[i] =
        inside ? static_cast<const T*>(c.from)[(outer * c.size + index) * c.inner + column] : T{};
  }
};

template <class T>
struct GatherNd {
  GatherNdCall c;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const uint32_t inner = static_cast<uint32_t>(c.inner);
    const int64_t* tuple = c.indices + static_cast<int64_t>(i / inner) * c.depth;
    int64_t from = i % inner;
    bool inside = true;
    for (int axis = 0; axis < c.depth; ++axis) {
      const int64_t index = tuple[axis] < 0 ? tuple[axis] + c.sizes[axis] : tuple[axis];
      inside = inside && index >= 0 && index < c.sizes[axis];
      from += index * c.strides[axis];
    }
    static_cast<T*>(c.to)[i] = inside ? static_cast<const T*>(c.from)[from] : T{};
  }
};

template <class T>
struct Pad {
  PadCall c;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const uint32_t to = i;
    int64_t from = 0, stride = 1;
    bool inside = true;
    for (int axis = c.axes - 1; axis >= 0; --axis) {
      const uint32_t size = static_cast<uint32_t>(c.to_sizes[axis]);
      const int64_t at = static_cast<int64_t>(i % size) - c.before[axis];
      i /= size;
      inside = inside && at >= 0 && at < c.from_sizes[axis];
      from += at * stride;
      stride *= c.from_sizes[axis];
    }
    static_cast<T*>(c.to)[to] = inside ? static_cast<const T*>(c.from)[from] : static_cast<T>(c.value);
  }
};

template <class T>
struct Resize {
  ResizeCall c;
  SD_ORT_DEVICE void operator()(uint32_t i) const {
    const uint32_t to = i;
    int64_t from = 0, stride = 1;
    for (int axis = c.axes - 1; axis >= 0; --axis) {
      const uint32_t size = static_cast<uint32_t>(c.to_sizes[axis]), at = i % size;
      i /= size;
      const int64_t source = static_cast<int64_t>(floorf(static_cast<float>(at) * c.steps[axis]));
      from += (source < c.from_sizes[axis] ? source : c.from_sizes[axis] - 1) * stride;
      stride *= c.from_sizes[axis];
    }
    static_cast<T*>(c.to)[to] = static_cast<const T*>(c.from)[from];
  }
};

// Calls launch(T{}) with the unsigned type T of this size.
template <class Launch>
const char* by_size(int bytes, Launch launch) {
  switch (bytes) {
    case 1:
      return launch(uint8_t{});
    case 2:
      return launch(uint16_t{});
    case 4:
      return launch(uint32_t{});
    case 8:
      return launch(kernel_uint64_t{});
    default:
      return "elements of this size are not supported";
  }
}

int64_t element_count(int axes, const int64_t* sizes) {
  int64_t count = 1;
  for (int axis = 0; axis < axes; ++axis) count *= sizes[axis];
  return count;
}

// Removes axes of size 1 and merges adjacent axes that are contiguous on both sides.
void merge_axes(StridedCopy& c) {
  int axes = 0;
  for (int axis = 0; axis < c.axes; ++axis) {
    if (c.sizes[axis] == 1) continue;
    const bool joins = axes > 0 && c.from_strides[axes - 1] == c.sizes[axis] * c.from_strides[axis] &&
                       c.to_strides[axes - 1] == c.sizes[axis] * c.to_strides[axis];
    if (joins) {
      c.sizes[axes - 1] *= c.sizes[axis];
    } else {
      c.sizes[axes++] = c.sizes[axis];
    }
    c.from_strides[axes - 1] = c.from_strides[axis];
    c.to_strides[axes - 1] = c.to_strides[axis];
  }
  c.axes = axes;
}

// Combines elements that are contiguous on both sides into wider ones of at most 16 bytes.
void widen(StridedCopy& c) {
  const int last = c.axes - 1;
  if (c.axes == 0 || c.from_strides[last] != 1 || c.to_strides[last] != 1) return;
  const auto even = [&] {
    const uintptr_t bytes = 2 * static_cast<uintptr_t>(c.element_bytes);
    bool all = c.sizes[last] % 2 == 0 && reinterpret_cast<uintptr_t>(c.from) % bytes == 0 &&
               reinterpret_cast<uintptr_t>(c.to) % bytes == 0;
    for (int axis = 0; axis < last; ++axis) all = all && c.from_strides[axis] % 2 == 0 && c.to_strides[axis] % 2 == 0;
    return all;
  };
  while (c.element_bytes < 16 && even()) {
    c.element_bytes *= 2;
    c.sizes[last] /= 2;
    for (int axis = 0; axis < last; ++axis) {
      c.from_strides[axis] /= 2;
      c.to_strides[axis] /= 2;
    }
  }
}

// Combines adjacent columns into wider elements of at most 16 bytes if all parts allow it.
void widen(ConcatCall& c) {
  const auto even = [&] {
    const uintptr_t bytes = 2 * static_cast<uintptr_t>(c.element_bytes);
    bool all = c.width % 2 == 0 && reinterpret_cast<uintptr_t>(c.full) % bytes == 0;
    for (int i = 0; i <= c.count; ++i) all = all && c.begins[i] % 2 == 0;
    for (int i = 0; i < c.count; ++i) all = all && reinterpret_cast<uintptr_t>(c.parts[i]) % bytes == 0;
    return all;
  };
  while (c.element_bytes < 16 && even()) {
    c.element_bytes *= 2;
    c.width /= 2;
    for (int i = 0; i <= c.count; ++i) c.begins[i] /= 2;
  }
}

}  // namespace

const char* concat(const ConcatCall& call, void* stream) {
  ConcatCall c = call;
  widen(c);
  const int32_t span = c.begins[c.count] - c.begins[0];
  const auto launch_for = [&](auto sample) {
    using T = decltype(sample);
    return move_each<T>(c.rows * span, ConcatParts<T>{c, Divisor(static_cast<uint32_t>(span))}, stream);
  };
  return c.element_bytes == 16 ? launch_for(Bits128{}) : by_size(c.element_bytes, launch_for);
}

const char* strided_copy(const StridedCopy& copy, void* stream) {
  StridedCopy c = copy;
  merge_axes(c);
  widen(c);
  const int64_t count = element_count(c.axes, c.sizes);
  if (c.element_bytes == 16) return for_each(count, Copy<Bits128>{c}, stream);
  return by_size(c.element_bytes, [&](auto sample) { return for_each(count, Copy<decltype(sample)>{c}, stream); });
}

const char* fill(void* to, int64_t count, const void* value, int element_bytes, void* stream) {
  return by_size(element_bytes, [&](auto sample) {
    using T = decltype(sample);
    T bits;
    memcpy(&bits, value, sizeof(T));
    return for_each(count, Fill<T>{static_cast<T*>(to), bits}, stream);
  });
}

const char* gather(const GatherCall& c, void* stream) {
  return by_size(c.element_bytes, [&](auto sample) {
    return for_each(c.outer * c.count * c.inner, Gather<decltype(sample)>{c}, stream);
  });
}

const char* gather_nd(const GatherNdCall& c, void* stream) {
  return by_size(c.element_bytes,
                 [&](auto sample) { return for_each(c.count * c.inner, GatherNd<decltype(sample)>{c}, stream); });
}

const char* pad(const PadCall& c, void* stream) {
  return by_size(c.element_bytes, [&](auto sample) {
    return for_each(element_count(c.axes, c.to_sizes), Pad<decltype(sample)>{c}, stream);
  });
}

const char* resize_nearest(const ResizeCall& c, void* stream) {
  return by_size(c.element_bytes, [&](auto sample) {
    return for_each(element_count(c.axes, c.to_sizes), Resize<decltype(sample)>{c}, stream);
  });
}

}  // namespace sd_ort
