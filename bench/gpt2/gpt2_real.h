/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_real.h: the element type of the model's tensors.
 *
 * The model's files are compiled once per dtype (bench/meson.build). With GPT2_BF16 a real is a bfloat16,
 * otherwise a float. Arithmetic is fp32 in both cases. The end of this header gives every global name of
 * these files a suffix, so that one program can contain both. If a name is missing there, the linker silently
 * uses one dtype's function for both; test/lint/same_names.py checks this. */
#ifndef ZERO_BENCH_GPT2_REAL_H
#define ZERO_BENCH_GPT2_REAL_H

#include "kernels/device.h"
#include "zero/zero.h"

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__ /* for the host and the GPU */
#define GPT2_HOST_DEVICE static inline __host__ __device__
#else
#define GPT2_HOST_DEVICE static inline
#endif

#ifdef GPT2_BF16

/* The upper half of a float. */
typedef uint16_t real;
#define GPT2_ZERO_DTYPE ZERO_BF16
#define GPT2_DTYPE_NAME "bf16"
#define GPT2_GEMM_DTYPE ZERO_BF16
#define GPT2_NAME(name) name##_bf16

GPT2_HOST_DEVICE float to_float(real x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Rounds to nearest, ties to even. A NaN stays a NaN. */
GPT2_HOST_DEVICE real from_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (real)(f != f ? (bits >> 16 | 0x40) : rounded);
}

#else

typedef float real;
#define GPT2_ZERO_DTYPE ZERO_F32
#define GPT2_DTYPE_NAME "f32"
#define GPT2_GEMM_DTYPE ZERO_F32
#define GPT2_NAME(name) name##_f32

GPT2_HOST_DEVICE float to_float(real x)
{
    return x;
}

GPT2_HOST_DEVICE real from_float(float f)
{
    return f;
}

#endif

/* Compiles a function once per instruction set; the program picks one at start. Each gives the same bits. Not
 * with sanitizers: they instrument the code that picks before they are initialised, and crash. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) &&                       \
    !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#if __GNUC__ >= 12 /* v4 has 64-bit integer multiplication, which drawing weights uses most */
#define GPT2_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define GPT2_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define GPT2_CLONES
#endif

#define gpt2_layers_for         GPT2_NAME(gpt2_layers_for)
#define gpt2_layers_host        GPT2_NAME(gpt2_layers_host)
#define gpt2_layers_cuda        GPT2_NAME(gpt2_layers_cuda)
#define gpt2_next_batch         GPT2_NAME(gpt2_next_batch)
#define gpt2_send_batch         GPT2_NAME(gpt2_send_batch)
#define gpt2_turn_to            GPT2_NAME(gpt2_turn_to)
#define gpt2_copy_residual      GPT2_NAME(gpt2_copy_residual)
#define gpt2_last_residual      GPT2_NAME(gpt2_last_residual)
#define gpt2_send_loss          GPT2_NAME(gpt2_send_loss)
#define gpt2_take_loss          GPT2_NAME(gpt2_take_loss)
#define gpt2_open               GPT2_NAME(gpt2_open)
#define gpt2_keep               GPT2_NAME(gpt2_keep)
#define gpt2_open_grads         GPT2_NAME(gpt2_open_grads)
#define gpt2_open_params        GPT2_NAME(gpt2_open_params)
#define gpt2_draw               GPT2_NAME(gpt2_draw)
#define gpt2_attention_scratch  GPT2_NAME(gpt2_attention_scratch)
#define gpt2_attention_forward  GPT2_NAME(gpt2_attention_forward)
#define gpt2_attention_merge    GPT2_NAME(gpt2_attention_merge)
#define gpt2_attention_backward GPT2_NAME(gpt2_attention_backward)
#define gpt2_activation_bytes   GPT2_NAME(gpt2_activation_bytes)
#define gpt2_close              GPT2_NAME(gpt2_close)
#define gpt2_embed_forward      GPT2_NAME(gpt2_embed_forward)
#define gpt2_embed_backward     GPT2_NAME(gpt2_embed_backward)
#define gpt2_layer_forward      GPT2_NAME(gpt2_layer_forward)
#define gpt2_layer_backward     GPT2_NAME(gpt2_layer_backward)
#define gpt2_head_forward       GPT2_NAME(gpt2_head_forward)
#define gpt2_head_backward      GPT2_NAME(gpt2_head_backward)
#define gpt2_vocab_localize     GPT2_NAME(gpt2_vocab_localize)
#define gpt2_vocab_top          GPT2_NAME(gpt2_vocab_top)
#define gpt2_vocab_exponentials GPT2_NAME(gpt2_vocab_exponentials)
#define gpt2_vocab_loss         GPT2_NAME(gpt2_vocab_loss)
#define gpt2_rows_of            GPT2_NAME(gpt2_rows_of)
#define gpt2_context_forward    GPT2_NAME(gpt2_context_forward)
#define gpt2_context_backward   GPT2_NAME(gpt2_context_backward)
#define gpt2_context_scratch    GPT2_NAME(gpt2_context_scratch)
#define llama_layers_for        GPT2_NAME(llama_layers_for)
#define llama_layers_host       GPT2_NAME(llama_layers_host)
#define llama_layers_cuda       GPT2_NAME(llama_layers_cuda)
#define plain_open              GPT2_NAME(plain_open)
#define plain_step              GPT2_NAME(plain_step)
#define plain_read              GPT2_NAME(plain_read)
#define plain_close             GPT2_NAME(plain_close)
#define plain_device_open       GPT2_NAME(plain_device_open)
#define plain_device_step       GPT2_NAME(plain_device_step)
#define plain_device_read       GPT2_NAME(plain_device_read)
#define plain_device_close      GPT2_NAME(plain_device_close)
#define train_open              GPT2_NAME(train_open)
#define train_configure         GPT2_NAME(train_configure)
#define train_after_wrap        GPT2_NAME(train_after_wrap)
#define train_reads_weights     GPT2_NAME(train_reads_weights)
#define train_first_element     GPT2_NAME(train_first_element)
#define train_close             GPT2_NAME(train_close)
#define plain_train_open        GPT2_NAME(plain_train_open)
#define plain_train_step        GPT2_NAME(plain_train_step)
#define pipeline_train_step     GPT2_NAME(pipeline_train_step)
#define pipeline_has_two_parts  GPT2_NAME(pipeline_has_two_parts)
#define pipeline_keep           GPT2_NAME(pipeline_keep)
#define train_next_text         GPT2_NAME(train_next_text)
#define train_take_loss         GPT2_NAME(train_take_loss)
#define train_time_is_up        GPT2_NAME(train_time_is_up)
#define train_report_step       GPT2_NAME(train_report_step)
#define train_describe          GPT2_NAME(train_describe)
#define train_join_tp           GPT2_NAME(train_join_tp)
#define train_join_cp           GPT2_NAME(train_join_cp)
#define train_cp_rows           GPT2_NAME(train_cp_rows)
#define train_load_text         GPT2_NAME(train_load_text)
#define train_save              GPT2_NAME(train_save)
#define train_load              GPT2_NAME(train_load)
#define train_import            GPT2_NAME(train_import)
#define train_export            GPT2_NAME(train_export)
#define train_reduce_tp         GPT2_NAME(train_reduce_tp)
#define train_hash_tp           GPT2_NAME(train_hash_tp)
#define train_run               GPT2_NAME(train_run)
#define train_introduce         GPT2_NAME(train_introduce)
#define train_end               GPT2_NAME(train_end)

#endif
