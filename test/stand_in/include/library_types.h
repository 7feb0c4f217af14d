/* SPDX-License-Identifier: Apache-2.0 */
/* library_types.h: the element types of the toolkit's libraries that this project uses, for the stand-in. */
#ifndef ZR_TEST_STAND_IN_LIBRARY_TYPES_H
#define ZR_TEST_STAND_IN_LIBRARY_TYPES_H

typedef enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 } cudaDataType_t;
typedef cudaDataType_t cudaDataType;

#endif
