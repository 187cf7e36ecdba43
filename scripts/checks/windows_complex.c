/* Complex functions of the C runtime that Wine 8 lacks, of which NumPy calls some when it is imported. Not accurate. */
#include <math.h>

#define FUNCTIONS(T, C, f)                                                                               \
  static C make##f(double real, double imaginary) { return (C){(T)real, (T)imaginary}; }                 \
  static double re##f(C a) { return __real__ a; }                                                        \
  static double im##f(C a) { return __imag__ a; }                                                        \
  T my_creal##f(C a) { return (T)re##f(a); }                                                             \
  T my_cimag##f(C a) { return (T)im##f(a); }                                                             \
  T my_cabs##f(C a) { return (T)hypot(re##f(a), im##f(a)); }                                             \
  T my_carg##f(C a) { return (T)atan2(im##f(a), re##f(a)); }                                             \
  C my_conj##f(C a) { return make##f(re##f(a), -im##f(a)); }                                             \
  C my_cexp##f(C a) { return make##f(exp(re##f(a)) * cos(im##f(a)), exp(re##f(a)) * sin(im##f(a))); }    \
  C my_clog##f(C a) { return make##f(log(my_cabs##f(a)), my_carg##f(a)); }                               \
  C my_csqrt##f(C a) {                                                                                   \
    const double root = sqrt(my_cabs##f(a)), angle = my_carg##f(a) / 2;                                  \
    return make##f(root * cos(angle), root * sin(angle));                                                \
  }                                                                                                      \
  C my_cpow##f(C a, C b) { return my_cexp##f(b * my_clog##f(a)); }                                       \
  C my_csinh##f(C a) { return make##f(sinh(re##f(a)) * cos(im##f(a)), cosh(re##f(a)) * sin(im##f(a))); } \
  C my_ccosh##f(C a) { return make##f(cosh(re##f(a)) * cos(im##f(a)), sinh(re##f(a)) * sin(im##f(a))); } \
  C my_ctanh##f(C a) { return my_csinh##f(a) / my_ccosh##f(a); }                                         \
  C my_casinh##f(C a) { return my_clog##f(a + my_csqrt##f(a * a + 1)); }                                 \
  C my_cacosh##f(C a) { return my_clog##f(a + my_csqrt##f(a + 1) * my_csqrt##f(a - 1)); }                \
  C my_catanh##f(C a) { return my_clog##f((1 + a) / (1 - a)) / 2; }                                      \
  C my_csin##f(C a) { return -make##f(0, 1) * my_csinh##f(make##f(0, 1) * a); }                          \
  C my_ccos##f(C a) { return my_ccosh##f(make##f(0, 1) * a); }                                           \
  C my_ctan##f(C a) { return -make##f(0, 1) * my_ctanh##f(make##f(0, 1) * a); }                          \
  C my_casin##f(C a) { return -make##f(0, 1) * my_casinh##f(make##f(0, 1) * a); }                        \
  C my_cacos##f(C a) { return make##f(acos(0), 0) - my_casin##f(a); }                                    \
  C my_catan##f(C a) { return -make##f(0, 1) * my_catanh##f(make##f(0, 1) * a); }

FUNCTIONS(double, double _Complex, )
FUNCTIONS(float, float _Complex, f)
