/* SPDX-License-Identifier: Apache-2.0 */
/* hf_folder.h: what beside weights and config.json belongs to a folder that Hugging Face's libraries load. */
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

/* Copies config.json from folder `from` to folder `to`, which zero_export has made, and sets the dtype of the
 * exported weights in it. Also copies generation_config.json, the tokenizer's files and chat templates, if
 * they are there. A file of `to` is replaced when the new one is complete. The folders may be the same one.
 * One rank calls this, after zero_export. ZERO_ERR_IO names the file. */
int hf_folder_copy(const char *from, const char *to, enum zero_dtype dtype);

/* Writes root as the file `name` of folder dir. An old file is replaced when the new one is complete. */
int hf_folder_store(const char *dir, const char *name, const json_t *root);

#endif
