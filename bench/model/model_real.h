/* SPDX-License-Identifier: Apache-2.0 */
/* model_real.h: the element type of the model's tensors.
 *
 * The model's files are compiled once per dtype (bench/meson.build). With MODEL_BF16 a real is a bfloat16,
 * otherwise a float. Arithmetic is fp32 in both cases. The end of this header gives every global name of
 * these files a suffix, so that one program can contain both. If a name is missing there, the linker silently
 * uses one dtype's function for both; test/lint/same_names.py checks this. */
#ifndef ZERO_BENCH_MODEL_REAL_H
#define ZERO_BENCH_MODEL_REAL_H

#include "kernels/device.h"
#include "zero/zero.h"

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__ /* for the host and the GPU */
#define MODEL_HOST_DEVICE static inline __host__ __device__
#else
#define MODEL_HOST_DEVICE static inline
#endif

#ifdef MODEL_BF16

/* The upper half of a float. */
typedef uint16_t real;
#define MODEL_DTYPE       ZERO_BF16
#define MODEL_DTYPE_NAME  "bf16"
#define MODEL_PASSES(ops) ((ops)->passes_bf16)
#define MODEL_NAME(name)  name##_bf16

MODEL_HOST_DEVICE float to_float(real x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Rounds to nearest, ties to even. A NaN stays a NaN. */
MODEL_HOST_DEVICE real from_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (real)(f != f ? (bits >> 16 | 0x40) : rounded);
}

#else

typedef float real;
#define MODEL_DTYPE       ZERO_F32
#define MODEL_DTYPE_NAME  "f32"
#define MODEL_PASSES(ops) ((ops)->passes_f32)
#define MODEL_NAME(name)  name##_f32

MODEL_HOST_DEVICE float to_float(real x)
{
    return x;
}

MODEL_HOST_DEVICE real from_float(float f)
{
    return f;
}

#endif

/* Compiles a function once per instruction set; the program picks one when it starts. All give the same bits.
 * This is off with sanitizers: they instrument the code that picks, which runs before they are initialised,
 * and crash. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) &&                       \
    !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#if __GNUC__ >= 12 /* v4 has 64-bit integer multiplication, which drawing weights uses most */
#define MODEL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MODEL_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define MODEL_CLONES
#endif

#define model_layers_for             MODEL_NAME(model_layers_for)
#define model_layers_host            MODEL_NAME(model_layers_host)
#define model_layers_cuda            MODEL_NAME(model_layers_cuda)
#define model_next_batch             MODEL_NAME(model_next_batch)
#define model_send_batch             MODEL_NAME(model_send_batch)
#define model_turn_to                MODEL_NAME(model_turn_to)
#define model_begin_backward         MODEL_NAME(model_begin_backward)
#define model_end_backward           MODEL_NAME(model_end_backward)
#define model_copy_residual          MODEL_NAME(model_copy_residual)
#define model_last_residual          MODEL_NAME(model_last_residual)
#define model_send_loss              MODEL_NAME(model_send_loss)
#define model_take_logits            MODEL_NAME(model_take_logits)
#define model_take_loss              MODEL_NAME(model_take_loss)
#define model_open                   MODEL_NAME(model_open)
#define model_keep                   MODEL_NAME(model_keep)
#define model_open_grads             MODEL_NAME(model_open_grads)
#define model_open_params            MODEL_NAME(model_open_params)
#define model_attention_scratch      MODEL_NAME(model_attention_scratch)
#define model_attention_forward      MODEL_NAME(model_attention_forward)
#define model_attention_merge        MODEL_NAME(model_attention_merge)
#define model_attention_backward     MODEL_NAME(model_attention_backward)
#define model_activation_bytes       MODEL_NAME(model_activation_bytes)
#define model_close                  MODEL_NAME(model_close)
#define model_vocab_localize         MODEL_NAME(model_vocab_localize)
#define model_vocab_top              MODEL_NAME(model_vocab_top)
#define model_vocab_exponentials     MODEL_NAME(model_vocab_exponentials)
#define model_vocab_loss             MODEL_NAME(model_vocab_loss)
#define model_rows_of                MODEL_NAME(model_rows_of)
#define model_context_forward        MODEL_NAME(model_context_forward)
#define model_context_backward       MODEL_NAME(model_context_backward)
#define model_context_scratch        MODEL_NAME(model_context_scratch)
#define model_draw                   MODEL_NAME(model_draw)
#define model_residual_before        MODEL_NAME(model_residual_before)
#define model_pointers_of            MODEL_NAME(model_pointers_of)
#define model_multiply               MODEL_NAME(model_multiply)
#define model_linear_args            MODEL_NAME(model_linear_args)
#define model_linear_forward         MODEL_NAME(model_linear_forward)
#define model_linear_input_args      MODEL_NAME(model_linear_input_args)
#define model_linear_backward_input  MODEL_NAME(model_linear_backward_input)
#define model_linear_backward_weight MODEL_NAME(model_linear_backward_weight)
#define model_project                MODEL_NAME(model_project)
#define model_project_part           MODEL_NAME(model_project_part)
#define model_project_sum            MODEL_NAME(model_project_sum)
#define model_all_rows               MODEL_NAME(model_all_rows)
#define model_all_rows_for_weights   MODEL_NAME(model_all_rows_for_weights)
#define model_kept_gradient          MODEL_NAME(model_kept_gradient)
#define model_own_sum                MODEL_NAME(model_own_sum)
#define model_attend                 MODEL_NAME(model_attend)
#define model_attend_backward        MODEL_NAME(model_attend_backward)
#define model_embed                  MODEL_NAME(model_embed)
#define model_embed_gradients        MODEL_NAME(model_embed_gradients)
#define model_loss_forward           MODEL_NAME(model_loss_forward)
#define model_loss_backward          MODEL_NAME(model_loss_backward)
#define model_first_id               MODEL_NAME(model_first_id)
#define model_n_ids                  MODEL_NAME(model_n_ids)
#define gpt2_passes                  MODEL_NAME(gpt2_passes)
#define llama_passes                 MODEL_NAME(llama_passes)
#define lora_hidden                  MODEL_NAME(lora_hidden)
#define lora_forward                 MODEL_NAME(lora_forward)
#define lora_backward_input          MODEL_NAME(lora_backward_input)
#define lora_backward_weight         MODEL_NAME(lora_backward_weight)
#define plain_open                   MODEL_NAME(plain_open)
#define plain_step                   MODEL_NAME(plain_step)
#define plain_read                   MODEL_NAME(plain_read)
#define plain_close                  MODEL_NAME(plain_close)
#define plain_device_open            MODEL_NAME(plain_device_open)
#define plain_device_step            MODEL_NAME(plain_device_step)
#define plain_device_read            MODEL_NAME(plain_device_read)
#define plain_device_close           MODEL_NAME(plain_device_close)
#define train_open                   MODEL_NAME(train_open)
#define train_configure              MODEL_NAME(train_configure)
#define train_after_wrap             MODEL_NAME(train_after_wrap)
#define train_agree                  MODEL_NAME(train_agree)
#define train_reads_weights          MODEL_NAME(train_reads_weights)
#define train_first_element          MODEL_NAME(train_first_element)
#define train_close                  MODEL_NAME(train_close)
#define plain_train_open             MODEL_NAME(plain_train_open)
#define plain_train_step             MODEL_NAME(plain_train_step)
#define pipeline_train_step          MODEL_NAME(pipeline_train_step)
#define pipeline_has_two_parts       MODEL_NAME(pipeline_has_two_parts)
#define pipeline_keep                MODEL_NAME(pipeline_keep)
#define train_take_loss              MODEL_NAME(train_take_loss)
#define train_time_is_up             MODEL_NAME(train_time_is_up)
#define train_report_step            MODEL_NAME(train_report_step)
#define train_join_tp                MODEL_NAME(train_join_tp)
#define train_join_cp                MODEL_NAME(train_join_cp)
#define train_cp_rows                MODEL_NAME(train_cp_rows)
#define train_save                   MODEL_NAME(train_save)
#define train_load                   MODEL_NAME(train_load)
#define train_load_weights           MODEL_NAME(train_load_weights)
#define train_import                 MODEL_NAME(train_import)
#define train_export                 MODEL_NAME(train_export)
#define train_move_weights           MODEL_NAME(train_move_weights)
#define train_import_adapters        MODEL_NAME(train_import_adapters)
#define train_export_adapters        MODEL_NAME(train_export_adapters)
#define train_export_merged          MODEL_NAME(train_export_merged)
#define train_reduce_tp              MODEL_NAME(train_reduce_tp)
#define train_hash_tp                MODEL_NAME(train_hash_tp)
#define train_run                    MODEL_NAME(train_run)
#define train_introduce              MODEL_NAME(train_introduce)
#define train_end                    MODEL_NAME(train_end)
#define train_count_tokens           MODEL_NAME(train_count_tokens)
#define train_mean_loss              MODEL_NAME(train_mean_loss)
#define train_next_rows              MODEL_NAME(train_next_rows)
#define plain_forward                MODEL_NAME(plain_forward)
#define pipeline_forward             MODEL_NAME(pipeline_forward)
#define train_evaluate               MODEL_NAME(train_evaluate)
#define train_next_held_out          MODEL_NAME(train_next_held_out)
#define train_save_best              MODEL_NAME(train_save_best)
#define train_data_size              MODEL_NAME(train_data_size)
#define train_load_data              MODEL_NAME(train_load_data)
#define train_open_rows              MODEL_NAME(train_open_rows)
#define train_next_whole             MODEL_NAME(train_next_whole)
#define train_trains                 MODEL_NAME(train_trains)
#define sample_generate              MODEL_NAME(sample_generate)
#define llama_layers_for             MODEL_NAME(llama_layers_for)
#define llama_layers_host            MODEL_NAME(llama_layers_host)
#define llama_layers_cuda            MODEL_NAME(llama_layers_cuda)

#endif
