/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_attention.cc: the GPT's attention of tensor cores, compiled for the CPU. */
#include "bench/model/attention.cu"
