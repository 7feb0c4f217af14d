/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_llama.cc: the Llama's CUDA kernels, compiled for the CPU. */
#include "bench/llama/llama_cuda.cu"
