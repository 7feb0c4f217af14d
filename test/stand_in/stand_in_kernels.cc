/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_kernels.cc: the text of the GPU's kernels, compiled for the CPU. */
#include "kernels/cuda/cuda_kernels.cu"
