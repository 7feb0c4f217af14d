/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_layers.cc: the GPT's CUDA kernels, compiled for the CPU. */
#include "bench/model/layers.cu"
