/* SPDX-License-Identifier: Apache-2.0 */
/* host_device_code.h: marks functions that run on the host and on a GPU. C and C++ compilers and nvcc compile
 * them. */
#ifndef ZR_KERNELS_HOST_DEVICE_CODE_H
#define ZR_KERNELS_HOST_DEVICE_CODE_H

#ifdef __CUDACC__
#define ZR_HOST_DEVICE static inline __host__ __device__
#define ALWAYS_INLINE  static __forceinline__ __host__ __device__
#else
#define ZR_HOST_DEVICE static inline __attribute__((unused))
#define ALWAYS_INLINE  static inline __attribute__((always_inline, unused))
#endif

#endif
