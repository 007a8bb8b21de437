// Makes standard normal numbers from 32 random bits, with the same bits on every machine. The code uses only
// + - * / and sqrt of doubles, which IEEE 754 rounds exactly; it uses no library function and no fused
// multiply-add.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/inline.h"

namespace tierstore {

// Returns the natural logarithm of a positive normal double, to about 1 ulp: x = m * 2^e with sqrt(1/2) <= m
// < sqrt(2), and log m = 2 atanh(s) with s = (m - 1) / (m + 1), whose series in s^2 <= 0.0295 is cut after
// s^21.
TIERSTORE_INLINE double PortableLog(double x) {
  constexpr std::uint64_t kMantissa = (std::uint64_t{1} << 52) - 1;
  constexpr std::uint64_t kHalfExponent = std::uint64_t{1022} << 52;
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const double exponent = static_cast<double>(static_cast<std::int64_t>(bits >> 52) - 1022);
  bits = (bits & kMantissa) | kHalfExponent;
  double half_to_one;
  std::memcpy(&half_to_one, &bits, sizeof half_to_one);
  const bool low = half_to_one < 0.70710678118654752440;
  const double m = low ? half_to_one + half_to_one : half_to_one;
  const double e = low ? exponent - 1.0 : exponent;
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double series = 1.0 / 21.0;
  for (int k = 19; k >= 1; k -= 2) series = series * z + 1.0 / k;
  return e * 0.69314718055994530942 + (s + s) * series;
}

template <int N>
TIERSTORE_INLINE double Polynomial(const double (&coefficients)[N], double x) {
  double value = coefficients[N - 1];
  for (int i = N - 2; i >= 0; --i) value = value * x + coefficients[i];
  return value;
}

// The inverse of the normal distribution function is algorithm AS 241 (PPND16) of M. J. Wichura, "The
// percentage points of the normal distribution", Applied Statistics 37 (1988) 477-484, with a relative error
// of about 1e-16. It has a central part, |p - 1/2| <= 0.425, and tails; the far tails (p < 1.4e-11) cannot
// occur here and are left out.
inline constexpr double kCentral = 0.425;

// The argument is q = p - 1/2.
TIERSTORE_INLINE double CentralQuantile(double q) {
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
  const double r = kCentral * kCentral - q * q;
  return q * Polynomial(a, r) / Polynomial(b, r);
}

TIERSTORE_INLINE double TailQuantile(double p) {
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
  const bool lower = p < 0.5;
  const double r = std::sqrt(-PortableLog(lower ? p : 1.0 - p)) - 1.6;
  const double value = Polynomial(c, r) / Polynomial(d, r);
  return lower ? -value : value;
}

// Sets out[i] to the standard normal number of bits[i]: the quantile of (bits[i] + 1/2) / 2^32. Numbers in
// the tails (15 %) are set aside, so that the central part and the tails both run in vectors.
template <int N>
TIERSTORE_INLINE void NormalNumbers(const std::uint32_t (&bits)[N], double (&out)[N]) {
  double p[N], tail_p[N], tail[N];
  for (int i = 0; i < N; ++i) {
    p[i] = (static_cast<double>(bits[i]) + 0.5) * 0x1p-32;
    out[i] = CentralQuantile(p[i] - 0.5);
  }
  int tails = 0, where[N];
  for (int i = 0; i < N; ++i) {
    where[tails] = i;
    tail_p[tails] = p[i];
    tails += std::abs(p[i] - 0.5) > kCentral;
  }
  for (int j = 0; j < tails; ++j) tail[j] = TailQuantile(tail_p[j]);
  for (int j = 0; j < tails; ++j) out[where[j]] = tail[j];
}

}  // namespace tierstore
