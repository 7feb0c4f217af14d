/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_norm.cc: the text of the GPU's sum of squares and end of a step, compiled for the CPU. */
#include "kernels/cuda/cuda_norm.cu"
