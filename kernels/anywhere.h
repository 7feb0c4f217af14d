/* anywhere.h: marks functions that the host and a GPU both compile: C, C++ and nvcc. */
#ifndef ZR_KERNELS_ANYWHERE_H
#define ZR_KERNELS_ANYWHERE_H

#ifdef __CUDACC__
#define ZR_ANYWHERE   static inline __host__ __device__
#define ALWAYS_INLINE static __forceinline__ __host__ __device__
#else
#define ZR_ANYWHERE   static inline __attribute__((unused))
#define ALWAYS_INLINE static inline __attribute__((always_inline, unused))
#endif

#endif
