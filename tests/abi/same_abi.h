// Compares a function type that sd-ort declares by itself with that of the vendor's header, as the x86-64 and AArch64
// calling conventions see them.
#pragma once

#include <cstddef>
#include <type_traits>

namespace abi {

// A type that the convention passes as `Theirs`, where `Ours` says.
template <class Ours, class Theirs>
constexpr bool is_same_value() {
  using A = std::remove_cv_t<Ours>;
  using B = std::remove_cv_t<Theirs>;
  if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    using PointeeA = std::remove_cv_t<std::remove_pointer_t<A>>;
    using PointeeB = std::remove_cv_t<std::remove_pointer_t<B>>;
    constexpr bool is_opaque = std::is_void_v<PointeeA> || std::is_void_v<PointeeB> || std::is_function_v<PointeeB>;
    // A struct may be declared longer than theirs, if it begins with it: hipblasLtMatmulHeuristicResult_t.
    if constexpr (is_opaque) {
      return true;
    } else if constexpr (std::is_class_v<PointeeA> && std::is_class_v<PointeeB>) {
      return sizeof(PointeeA) >= sizeof(PointeeB) && alignof(PointeeA) >= alignof(PointeeB);
    } else {
      return is_same_value<PointeeA, PointeeB>();
    }
  } else if constexpr (std::is_class_v<A> && std::is_class_v<B>) {
    return sizeof(A) == sizeof(B) && alignof(A) == alignof(B) && std::is_trivially_copyable_v<A> &&
           std::is_trivially_copyable_v<B>;
  } else if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>) {
    return std::is_same_v<A, B>;
  } else if constexpr (std::is_void_v<A> || std::is_void_v<B>) {
    return std::is_void_v<A> && std::is_void_v<B>;
  } else {
    constexpr bool are_numbers =
        (std::is_integral_v<A> || std::is_enum_v<A>) && (std::is_integral_v<B> || std::is_enum_v<B>);
    return are_numbers && sizeof(A) == sizeof(B);
  }
}

template <class Ours, class Theirs>
struct SameFunction : std::false_type {};
template <class A, class... As, class B, class... Bs>
struct SameFunction<A(As...), B(Bs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(As) == sizeof...(Bs)) return is_same_value<A, B>() && (is_same_value<As, Bs>() && ...);
    return false;
  }();
};
template <class A, class... As, class B, class... Bs>
struct SameFunction<A(As...), B(Bs...) noexcept> : SameFunction<A(As...), B(Bs...)> {};

// Whether calling a function of type `Theirs` by the declaration `Ours` passes and returns the same. Both are function
// types or pointers to functions.
template <class Ours, class Theirs>
constexpr bool same_function =
    SameFunction<std::remove_pointer_t<std::remove_cv_t<Ours>>, std::remove_pointer_t<std::remove_cv_t<Theirs>>>::value;

}  // namespace abi

// `ours` is a function, or a pointer to one.
#define ASSERT_SAME_FUNCTION(ours, theirs)                                                        \
  static_assert(::abi::same_function<std::remove_reference_t<decltype(ours)>, decltype(&theirs)>, \
                #ours " is not declared as " #theirs)
