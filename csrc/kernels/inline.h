// Marks functions that every instruction set inlines, and that device code calls, too.
#pragma once

#if defined(__CUDACC__)
#define TIERSTORE_INLINE __host__ __device__ __forceinline__
#else
#define TIERSTORE_INLINE inline __attribute__((always_inline))
#endif
