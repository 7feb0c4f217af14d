/* SPDX-License-Identifier: Apache-2.0 */
/* sample_cmd.c: the command line of zero-bench sample. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/llama/hf_folder.h"
#include "bench/sample/sample.h"
#include "bench/train/text_tokens.h"
#include "bench/train/train.h"

struct sample_command {
    struct train_options train;
    struct sample_options sample;
};

/* A folder of --model has the weights and the tokenizer, if no others are named. */
static error_t finish(struct argp_state *state, void *options)
{
    struct sample_command *c = options;
    struct train_options *o = &c->train;
    char fault[128];
    if (!o->load && !o->import_from && o->model.dir && hf_folder_has_weights(o->model.dir))
        o->import_from = o->model.dir;
    if (!c->sample.tokenizer && o->model.dir && text_has_tokenizer(o->model.dir))
        c->sample.tokenizer = o->model.dir;
    if (!o->load == !o->import_from)
        return option_fault(state, "--load or --import: %s", o->load ? "both are given" : "one is needed");
    if (c->sample.prompt && !*c->sample.prompt)
        return option_fault(state, "--prompt: is empty");
    if (c->sample.temperature == 0.0 && (c->sample.top_k || c->sample.top_p < 1.0))
        return option_fault(state, "--top-%c: needs a --temperature above 0", c->sample.top_k ? 'k' : 'p');
    if (o->pp > o->model.config.layers)
        return option_fault(state, "--pp: %lld stages are more than the %lld layers", (long long)o->pp,
                            (long long)o->model.config.layers);
    return model_tp_fault(&o->model.config, fault, sizeof fault) ? option_fault(state, "%s", fault) : 0;
}

#define OPTION_STRUCT struct sample_command
static const struct option_row rows[] = {
    {"load", "DIR", "A checkpoint, or a folder of them: the latest", OPTION_TEXT(train.load), .group = 2},
    {"import", "DIR", "A folder of weights under Hugging Face's names (the folder of --model)",
     OPTION_TEXT(train.import_from)},
    {"dtype", "f32|bf16", "The dtype of the parameters; a checkpoint must have the same (f32)",
     OPTION_WORD(train.dtype, option_dtypes)},
    {.help = "Text:"},
    {"prompt", "TEXT",
     "Text to continue. The model sees the last --context tokens (the tokens that begin a text, or a line "
     "break)",
     OPTION_TEXT(sample.prompt)},
    {"tokenizer", "PATH",
     "A Hugging Face tokenizer.json, or its folder (that of --model if it has one; otherwise tokens are "
     "bytes)",
     OPTION_TEXT(sample.tokenizer)},
    {"tokens", "N", "Tokens to generate, unless a special token ends the text before (200)",
     OPTION_INT(sample.n_tokens, 1, 1000000)},
    {"temperature", "X", "Below 1, likely tokens become likelier; 0: always the likeliest (0.8)",
     OPTION_DOUBLE(sample.temperature, 0, 1000)},
    {"top-k", "N", "Choose from the N likeliest tokens (all)", OPTION_INT(sample.top_k, 1, INT32_MAX)},
    {"top-p", "X", "Of these, choose from the likeliest that together have this probability (1)",
     OPTION_DOUBLE(sample.top_p, 0, 1)},
    {"seed", "N", "Seed of the choices (1)", OPTION_INT(sample.seed, 0, INT64_MAX)},
    {.help = "Sharding:"},
    {"stage", "0..3", "3: parameters are sharded until they are gathered for the text (0)",
     OPTION_INT(train.stage, 0, 3)},
    {"tp", "N", "Cut each layer over N ranks; divides ranks and heads (1)",
     OPTION_INT(train.model.own.tp, 1, 1024)},
    {"pp", "N", "Divide the layers into N stages of a pipeline, on as many ranks; divides ranks (1)",
     OPTION_INT(train.pp, 1, 10000)},
    {"budget", "BYTES",
     "For gathered parameters at stage 3. If they do not fit, each token gathers the layers again, one after "
     "another (no limit)",
     OPTION_BYTES(train.budget, 1)},
    {.help = "Running:"},
    {"device", "host|cuda", "Where the model computes (host)", OPTION_WORD(train.device, option_devices)},
    {"gpu", "N", "Which GPU (the rank's number on this host)", OPTION_INT(train.gpu, 0, 1000)},
    {"threads", "N", "Threads of each rank on the host, for products and layers (1)",
     OPTION_INT(train.threads, 1, 1024)},
    {"json", NULL, "One line of JSON, with the ids of the tokens", OPTION_FLAG(train.json)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "Prints text that a model generates, from the weights of a checkpoint or an export, on as many "
           "ranks as zero-run starts. Ranks with the same weights choose the same tokens.",
    .finish = finish,
    OPTIONS_WITH_MODEL(struct sample_command, train.model),
};

int sample_command(const char *name, int argc, char **argv)
{
    struct sample_command c;
    c.train = train_defaults(&(struct model_options){0});
    c.sample = (struct sample_options){.n_tokens = 200, .temperature = 0.8, .top_p = 1.0, .seed = 1};
    c.train.batch = 1;
    c.train.sample = &c.sample;
    int status = options_parse(&table, name, argc, argv, &c);
    if (status)
        return status;
    return c.train.dtype == ZERO_BF16 ? train_run_bf16(&c.train) : train_run_f32(&c.train);
}
