/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_copy.cc: the text of the GPU's table of copies, compiled for the CPU. */
#include "kernels/cuda/cuda_copy.cu"
