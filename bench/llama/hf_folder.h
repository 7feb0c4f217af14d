/* SPDX-License-Identifier: Apache-2.0 */
/* hf_folder.h: the files of a Hugging Face folder that an export copies from the model's folder, such as
 * config.json and the tokenizer. libzero reads and writes the weights themselves. */
#ifndef ZERO_BENCH_HF_FOLDER_H
#define ZERO_BENCH_HF_FOLDER_H

#include "zero/types.h"

#include <stdbool.h>
#include <stddef.h>

#include <jansson.h>

/* Whether there are weights in folder dir: model.safetensors, or an index of several files. */
bool hf_folder_has_weights(const char *dir);

/* Finds a file of weights in a folder without those, such as pytorch_model.bin or a part whose index is
 * missing. Adapters do not count. Returns false if there is none. */
bool hf_folder_has_others(const char *dir, char *name, size_t n);

/* Whether both are the same folder or file, or will be when they are made. */
bool hf_folder_is_same(const char *a, const char *b);

/* Copies config.json from folder `from` to folder `to`, which zero_export has made, and sets its dtype to
 * that of the exported weights. Also copies generation_config.json, the tokenizer's files and chat templates,
 * if they exist. An old file is replaced only when the new one is complete. The folders may be the same. One
 * rank calls this, after zero_export. Returns 0 or ZERO_ERR_IO, whose message names the file. */
int hf_folder_copy(const char *from, const char *to, enum zero_dtype dtype);

/* Writes root as the file `name` of folder dir. An old file is replaced only when the new one is complete. */
int hf_folder_store(const char *dir, const char *name, const json_t *root);

#endif
