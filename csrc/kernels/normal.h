// Standard normal numbers from 32 random bits, with the same bits on every machine: only + - * / and sqrt of
// doubles, which IEEE 754 rounds exactly, no library function and no fused multiply-add.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/isa.h"

namespace tierstore {

// Natural logarithm of a positive normal double, to about 1 ulp: x = m * 2^e with sqrt(1/2) <= m < sqrt(2),
// and log m = 2 atanh(s) with s = (m - 1) / (m + 1), whose series in s^2 <= 0.0295 is cut after s^21.
TIERSTORE_INLINE double PortableLog(double x) {
  constexpr std::uint64_t kMantissa = (std::uint64_t{1} << 52) - 1;
  constexpr std::uint64_t kHalfExponent = std::uint64_t{1022} << 52;
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  double exponent = static_cast<double>(static_cast<std::int64_t>(bits >> 52) - 1022);
  bits = (bits & kMantissa) | kHalfExponent;
  double m;
  std::memcpy(&m, &bits, sizeof m);  // in [1/2, 1)
  if (m < 0.70710678118654752440) {
    m += m;
    exponent -= 1.0;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double series = 1.0 / 21.0;
  for (int k = 19; k >= 1; k -= 2) series = series * z + 1.0 / k;
  return exponent * 0.69314718055994530942 + (s + s) * series;
}

template <int N>
TIERSTORE_INLINE double Polynomial(const double (&coefficients)[N], double x) {
  double value = coefficients[N - 1];
  for (int i = N - 2; i >= 0; --i) value = value * x + coefficients[i];
  return value;
}

// Inverse of the normal distribution function, 0 < p < 1: algorithm AS 241 (PPND16) of M. J. Wichura, "The
// percentage points of the normal distribution", Applied Statistics 37 (1988) 477-484; relative error about
// 1e-16.
TIERSTORE_INLINE double NormalQuantile(double p) {
  constexpr double a[] = {3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3,
                          1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                          3.3430575583588128105e+4, 2.5090809287301226727e+3};
  constexpr double b[] = {1.0,
                          4.2313330701600911252e+1,
                          6.8718700749205790830e+2,
                          5.3941960214247511077e+3,
                          2.1213794301586595867e+4,
                          3.9307895800092710610e+4,
                          2.8729085735721942674e+4,
                          5.2264952788528545610e+3};
  constexpr double c[] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                          3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                          2.27238449892691845833e-2, 7.74545014278341407640e-4};
  constexpr double d[] = {1.0,
                          2.05319162663775882187e0,
                          1.67638483018380384940e0,
                          6.89767334985100004550e-1,
                          1.48103976427480074590e-1,
                          1.51986665636164571966e-2,
                          5.47593808499534494600e-4,
                          1.05075007164441684324e-9};
  constexpr double e[] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                          2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                          2.71155556874348757815e-5, 2.01033439929228813265e-7};
  constexpr double f[] = {1.0,
                          5.99832206555887937690e-1,
                          1.36929880922735805310e-1,
                          1.48753612908506148525e-2,
                          7.86869131145613259100e-4,
                          1.84631831751005468180e-5,
                          1.42151175831644588870e-7,
                          2.04426310338993978564e-15};
  const double q = p - 0.5;
  if (q >= -0.425 && q <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * Polynomial(a, r) / Polynomial(b, r);
  }
  double r = std::sqrt(-PortableLog(q < 0.0 ? p : 1.0 - p));
  double value;
  if (r <= 5.0) {
    r -= 1.6;
    value = Polynomial(c, r) / Polynomial(d, r);
  } else {
    r -= 5.0;
    value = Polynomial(e, r) / Polynomial(f, r);
  }
  return q < 0.0 ? -value : value;
}

}  // namespace tierstore
