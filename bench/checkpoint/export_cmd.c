/* SPDX-License-Identifier: Apache-2.0 */
/* export_cmd.c: zero-bench export. It writes the weights of a checkpoint as files for Hugging Face's
 * libraries, under the published names of their kind. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/llama/lora_config.h"
#include "bench/train/train.h"

static error_t finish(struct argp_state *state, void *options)
{
    const struct train_options *o = options;
    if (!o->load || (!o->export_to && !o->export_merged))
        return option_fault(state, "%s: is needed", o->load ? "--out" : "--load");
    if (o->export_merged && !o->model.config.lora_rank)
        return option_fault(state, "--out-merged: needs --lora");
    return train_check_exports(state, o);
}

#define OPTION_STRUCT struct train_options
static const struct option_row rows[] = {
    {"load", "DIR", "A checkpoint, or a folder of them: the latest", OPTION_TEXT(load), .group = 2},
    {"out", "DIR", "Where the files go", OPTION_TEXT(export_to)},
    {"out-merged", "DIR", "With --lora: where the model's weights with the adapters added go",
     OPTION_TEXT(export_merged)},
    {"max-file", "BYTES", "Of one file (5 GB)", OPTION_BYTES(export_max, 1)},
    {"dtype", "f32|bf16", "Of the model that was saved (f32)", OPTION_WORD(dtype, option_dtypes)},
    LORA_ROWS(model.),
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "Writes the weights of a checkpoint as safetensors files under the model's published names: "
           "model.safetensors, or model-ID-0000i-of-0000N.safetensors and model.safetensors.index.json.",
    .finish = finish,
    OPTIONS_WITH_MODEL(struct train_options, model),
};

int export_command(const char *name, int argc, char **argv)
{
    struct train_options o = train_defaults(&(struct model_options){0});
    o.only_exports = true;
    o.batch = 1;
    o.stage = 3;
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    return o.dtype == ZERO_BF16 ? train_run_bf16(&o) : train_run_f32(&o);
}
