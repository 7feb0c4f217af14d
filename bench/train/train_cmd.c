/* SPDX-License-Identifier: Apache-2.0 */
/* train_cmd.c: the command line of zero-bench train. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/compute.h"
#include "bench/llama/hf_config.h"
#include "bench/llama/hf_folder.h"
#include "bench/llama/lora_config.h"
#include "bench/report/plot.h"
#include "bench/schedule/pipeline_stages.h"
#include "bench/train/text_tokens.h"
#include "bench/train/train.h"
#include "kernels/device.h"

#include <string.h>

#define UNSET (-1.0)

static const struct option_word lr_kinds[] = {
    {"constant", LR_CONSTANT}, {"cosine", LR_COSINE}, {"linear", LR_LINEAR}, {0}};

/* Adds a file to the list at `to`. A word that is not an option belongs to the list before it. */
static error_t add_file(struct argp_state *state, const struct option_row *row, char *path, void *to)
{
    (void)state;
    struct train_options *o = (void *)((char *)to - (row ? row->at : 0));
    struct train_files *list = row ? to : o->listing ? o->listing : &o->data;
    const char **paths = realloc(list->paths, (size_t)(list->n + 1) * sizeof *paths);
    if (!paths)
        return ENOMEM;
    o->listing = list;
    list->paths = paths;
    list->paths[list->n++] = path;
    return 0;
}

static error_t read_documents(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    struct train_options *o = to;
    if (strcmp(arg, "end") != 0)
        return option_int(state, row, arg, &o->documents);
    o->documents = TRAIN_DOCUMENTS_END;
    return 0;
}

/* Refuses options for data that do not go together. */
static error_t check_data(struct argp_state *state, const struct train_options *o)
{
    if (o->tokens.n && o->data.n)
        return option_fault(state, "--data: not with --tokens");
    if (!o->tokens.n && (o->token_bytes || o->end_token >= 0 || o->masks.n))
        return option_fault(state, "--%s: is of the files of --tokens",
                            o->token_bytes ? "token-bytes"
                            : o->masks.n   ? "mask"
                                           : "end-token");
    if (o->masks.n && o->masks.n != o->tokens.n)
        return option_fault(state, "--mask: %d files, but --tokens has %d", o->masks.n, o->tokens.n);
    if (o->token_bytes && o->token_bytes != 2 && o->token_bytes != 4)
        return option_fault(state, "--token-bytes: is 2 or 4");
    if (o->documents && (o->documents == TRAIN_DOCUMENTS_END) != (o->tokens.n || o->encodes))
        return option_fault(state,
                            "--documents: is 'end' with --tokens or a tokenizer, and a number of bytes "
                            "without");
    if (o->end_token >= 0 && !o->documents)
        return option_fault(state, "--end-token: needs --documents end");
    if (o->eval_tokens.n && (o->held_out > 0 || !o->tokens.n))
        return option_fault(state, "--eval-tokens: is for --tokens, and not with --held-out");
    if (o->eval_masks.n && o->eval_masks.n != o->eval_tokens.n)
        return option_fault(state, "--eval-mask: %d files, but --eval-tokens has %d", o->eval_masks.n,
                            o->eval_tokens.n);
    bool evaluates = o->held_out > 0 || o->eval_tokens.n;
    if ((o->eval_every || o->keep_best) && !evaluates)
        return option_fault(state, "--%s: needs --held-out or --eval-tokens",
                            o->eval_every ? "eval-every" : "keep-best");
    return 0;
}

/* Fills in what was not given of the learning rate, and checks it. */
static error_t finish_rate(struct argp_state *state, struct train_options *o)
{
    struct lr_schedule *s = &o->rate;
    bool falls = s->kind != LR_CONSTANT;
    s->lr = s->lr == UNSET ? o->model.default_lr : s->lr;
    if (!falls && (s->min_lr > 0 || s->steps))
        return option_fault(state, "--%s: needs --lr-schedule cosine or linear",
                            s->steps ? "lr-steps" : "min-lr");
    s->steps = s->steps ? s->steps : o->steps;
    if (falls && s->steps == INT64_MAX)
        return option_fault(state,
                            "--lr-schedule: needs --steps or --lr-steps, at which the rate has fallen");
    if (falls && s->steps <= s->warmup)
        return option_fault(state, "--warmup: %lld steps leave none of %lld to the schedule",
                            (long long)s->warmup, (long long)s->steps);
    if (s->min_lr > s->lr)
        return option_fault(state, "--min-lr: %g is above --lr, which is %g", s->min_lr, s->lr);
    return 0;
}

error_t train_check_exports(struct argp_state *state, const struct train_options *o)
{
    const struct model_config *c = &o->model.config;
    const char *name = o->only_exports ? "out" : "export";
    const char *merged = c->lora_rank ? "-merged" : "";
    const char *weights = c->lora_rank ? o->export_merged : o->export_to;
    if (!o->model.dir)
        return 0;
    if ((o->export_to || o->export_merged) && c->layers != c->hf->layers)
        return option_fault(state, "--layers: with --%s it must be the %lld of the folder's config.json",
                            name, (long long)c->hf->layers);
    if (weights && hf_folder_is_same(weights, o->model.dir))
        return option_fault(state, "--%s%s: is the folder of --model, whose weights stay", name, merged);
    if (c->lora_rank && weights && o->export_to && hf_folder_is_same(weights, o->export_to))
        return option_fault(state, "--%s-merged: is the folder of --%s, which is for the adapters", name,
                            name);
    return 0;
}

/* A folder's weights are where training begins, if it has any. */
static error_t finish_folder(struct argp_state *state, struct train_options *o)
{
    if (o->adapter && lora_config_read(&o->model.config, o->adapter))
        return option_fault(state, "--adapter: %s", zr_error_text());
    char other[256];
    if (!o->import_from && !o->plain && hf_folder_has_weights(o->model.dir))
        o->import_from = o->model.dir;
    if (!o->import_from && !o->plain && hf_folder_has_others(o->model.dir, other, sizeof other))
        return option_fault(state,
                            "--model: %s has %s, but neither model.safetensors nor "
                            "model.safetensors.index.json; without any weights they would be drawn",
                            o->model.dir, other);
    return train_check_exports(state, o);
}

/* Fills in what was not given, and refuses options that do not go together. */
static error_t finish(struct argp_state *state, void *options)
{
    struct train_options *o = options;
    if (o->beta2 == UNSET) {
        const struct zr_optimizer_kind *kind = zr_optimizer_kind((enum zero_optimizer)o->optimizer);
        o->beta2 = kind->bias_correction ? 0.95 : (double)kind->beta2;
    }
    o->model.config.documents = o->documents != 0;
    o->steps = o->steps >= 0 ? o->steps : o->seconds > 0 ? INT64_MAX : 100;
    o->encodes = o->data.n && o->model.dir && text_has_tokenizer(o->model.dir);
    error_t err = check_data(state, o);
    err = err ? err : finish_rate(state, o);
    if (!err && o->model.dir)
        err = finish_folder(state, o);
    if (!err && (o->adapter || o->export_merged) && !o->model.config.lora_rank)
        err = option_fault(state, "--%s: needs %s", o->adapter ? "adapter" : "export-merged",
                           o->adapter ? "the folder of a model as --model" : "--lora or --adapter");
    if (err)
        return err;
    if (!o->save && (o->save_every || o->keep || o->save_async || o->keep_best ||
                     (o->load && !strcmp(o->load, "latest"))))
        return option_fault(
            state, "--save: is needed by --save-every, --save-async, --keep, --keep-best and --load latest");
    if (o->plain && o->model.config.lora_rank)
        return option_fault(state, "--lora: not with --plain");
    if (o->plain && (o->save || o->load || o->import_from || o->export_to))
        return option_fault(state, "--plain: saves, loads, imports and exports nothing");
    const struct model_config *c = &o->model.config;
    char fault[128];
    if (model_tp_fault(c, fault, sizeof fault) || model_cp_fault(c, fault, sizeof fault))
        return option_fault(state, "%s", fault);
    int64_t tokens = o->batch * model_own_context(c);
    if (c->sequence && (c->tp < 2 || tokens % c->tp))
        return option_fault(
            state,
            "--sequence-parallel: is for --tp of 2 or more, which divides the %lld tokens of a micro-batch",
            (long long)tokens);
    if ((c->tp > 1 || c->cp > 1) && o->plain)
        return option_fault(state, "--%s: not with --plain", c->tp > 1 ? "tp" : "cp");
    if (o->pp * o->stages_per_rank > c->layers)
        return option_fault(state, "--pp%s: %lld stages are more than the %lld layers",
                            o->stages_per_rank > 1 ? " and --stages-per-rank" : "",
                            (long long)(o->pp * o->stages_per_rank), (long long)c->layers);
    if (o->stages_per_rank > 1 && o->pp <= 1)
        return option_fault(state, "--stages-per-rank: is of the stages of --pp");
    if (o->pp > 1 && o->plain)
        return option_fault(state, "--pp: not with --plain");
    if ((o->schedule != ZERO_SCHEDULE_1F1B || o->schedule_file) && o->pp <= 1)
        return option_fault(state, "%s: is of the stages of --pp",
                            o->schedule_file ? "--schedule-file" : "--schedule");
    if (o->plain && o->trace)
        return option_fault(state, "--plain: has no timeline for --trace, which is libzero's");
    if (o->plain && o->optimizer != ZERO_ADAMW)
        return option_fault(state, "--optimizer: --plain knows adamw only");
    if (o->plain && states_given(&o->states))
        return option_fault(state, "--plain: keeps sums, masters and moments in fp32 and in its own memory");
    const char *states = states_fault(&o->states, (int)o->dtype);
    states = states ? states : states_dir_fault(&o->states);
    if (states)
        return option_fault(state, "%s", states);
    return 0;
}

#define OPTION_STRUCT       struct train_options
#define OPTION_FILES(field) .read = add_file, .at = OPTION_AT(OPTION_STRUCT, field, struct train_files : 0)
static const struct option_row rows[] = {
    {"dtype", "f32|bf16", "The dtype of weights, gradients and activations (f32)",
     OPTION_WORD(dtype, option_dtypes)},
    {.help = "Data:"},
    {"data", "PATH",
     "A file of text, or a folder of them; more may follow (the C headers under /usr/include)",
     OPTION_FILES(data)},
    {"tokens", "FILE",
     "A file of token ids in the format of llm.c, instead of text; more may follow. Each epoch takes all "
     "rows "
     "in another order",
     OPTION_FILES(tokens)},
    {"token-bytes", "2|4", "Files of --tokens have no header, and ids are unsigned integers of so many bytes",
     OPTION_INT(token_bytes, 2, 4)},
    {"mask", "FILE",
     "For each file of --tokens, in order, a file with a byte for each token: those with 0 do not count in "
     "the loss",
     OPTION_FILES(masks)},
    {"documents", "N|end",
     "Rows are packs of documents, which do not see each other: of about N bytes of text, or divided at end "
     "tokens. A document begins with one in files of llm.c, and ends with one in files without a header",
     OPTION_BY(read_documents), .min = 1, .max = 1000000},
    {"end-token", "ID", "Divides documents of --tokens (50256 in llm.c's files of GPT-2, else none)",
     OPTION_INT(end_token, 0, INT32_MAX)},
    {"held-out", "FRACTION", "Do not train on this last part of the data, and print its loss",
     OPTION_DOUBLE(held_out, 1e-9, 0.999)},
    {"eval-tokens", "FILE", "Print the loss of these files, which are like those of --tokens",
     OPTION_FILES(eval_tokens)},
    {"eval-mask", "FILE", "For each file of --eval-tokens, what --mask is for --tokens",
     OPTION_FILES(eval_masks)},
    {"eval-every", "N",
     "Print the loss of --held-out or --eval-tokens after every N-th step (at the end only)",
     OPTION_INT(eval_every, 1, INT64_MAX / 2)},
    {.help = "Training:"},
    {"batch", "N", "Rows in a micro-batch of one rank (4)", OPTION_INT(batch, 1, 1000000)},
    {"accum", "N", "Micro-batches per step and rank (1)", OPTION_INT(accum, 1, 100000)},
    {"steps", "N", "Steps (100; no limit with --seconds)", OPTION_INT(steps, 1, INT64_MAX / 2)},
    {"seconds", "N", "Stop at the step during which so many seconds have passed",
     OPTION_DOUBLE(seconds, 0.001, 1e9)},
    {"optimizer", "NAME", "One of:" OPTION_OPTIMIZERS " (adamw)", OPTION_WORD(optimizer, option_optimizers)},
    {"lr", "X", "The highest learning rate (one that suits the model)", OPTION_DOUBLE(rate.lr, 0, 1e6)},
    {"warmup", "N", "Steps over which the learning rate rises to --lr (10)",
     OPTION_INT(rate.warmup, 0, INT64_MAX / 2)},
    {"lr-schedule", "constant|cosine|linear",
     "How the learning rate falls from --lr to --min-lr, after --warmup (constant)",
     OPTION_WORD(rate.kind, lr_kinds)},
    {"min-lr", "X", "What the learning rate falls to (0)", OPTION_DOUBLE(rate.min_lr, 0, 1e6)},
    {"lr-steps", "N", "Steps after which the learning rate is --min-lr (those of --steps)",
     OPTION_INT(rate.steps, 1, INT64_MAX / 2)},
    {"beta1", "X", "The first beta, or the momentum (0.9)", OPTION_DOUBLE(beta1, 0, 0.999999)},
    {"beta2", "X", "The second beta (adamw, adam: 0.95; else the optimizer's own)",
     OPTION_DOUBLE(beta2, 0, 0.999999)},
    {"weight-decay", "X", "Weight decay of matrices; biases and norms have none (0.1)",
     OPTION_DOUBLE(weight_decay, 0, 1e6)},
    {"label-smoothing", "X", "The part of each target that all tokens share (0)",
     OPTION_DOUBLE(model.own.label_smoothing, 0, 0.999999)},
    {"clip", "X", "Largest gradient norm, 0 for none (1)", OPTION_DOUBLE(clip, 0, 1e30)},
    {"seed", "N", "Draws the weights and chooses the text (1)", OPTION_INT(seed, 0, INT64_MAX)},
    LORA_ROWS(model.),
    {.help = "Sharding:"},
    {"plain", NULL, "The same model without libzero, on one rank", OPTION_FLAG(plain)},
    {"stage", "0..3", "What is sharded: nothing, optimizer state, gradients too, parameters too (0)",
     OPTION_INT(stage, 0, 3)},
    {"dp-replicate", "N|auto",
     "With --stage 3: the number of groups of ranks, each with its own copy of what is sharded; auto: one "
     "per host (1)",
     OPTION_INT_OR_AUTO(dp_replicate, 1, 1000000)},
    {"dp-shard", "N", "Ranks in each group (the world divided by the other axes)",
     OPTION_INT(dp_shard, 0, 1000000)},
    {"hybrid", "hsdp|hfsdp",
     "With --dp-replicate: whether groups hold the same optimizer states, or shard them, too (hsdp)",
     OPTION_WORD(hybrid, option_hybrid)},
    {"tp", "N", "Cut each layer over N ranks, which have the same data; divides ranks and heads (1)",
     OPTION_INT(model.own.tp, 1, 1024)},
    MODEL_CP_ROWS(model.),
    {"pp", "N",
     "Divide the layers into N stages of a pipeline, on as many ranks, or into --stages-per-rank times N; "
     "divides ranks. The last stage's first rank reports, instead of rank 0 (1)",
     OPTION_INT(pp, 1, 10000)},
    {"schedule", "1f1b|gpipe|interleaved|zero-bubble",
     "With --pp: the order of micro-batches; interleaved is for several stages on a rank, and keeps more "
     "micro-batches; zero-bubble splits backward in two parts, and keeps gradients between them (1f1b)",
     OPTION_WORD(schedule, pipe_schedules)},
    {"stages-per-rank", "N",
     "With --pp N and --schedule interleaved or gpipe, or --schedule-file: pipeline stages on each of the N "
     "ranks, so that they are idle less (1)",
     OPTION_INT(stages_per_rank, 1, PIPE_MAX_OWN)},
    {"schedule-file", "FILE",
     "Instead of --schedule: a CSV file of PyTorch, with a line for each rank of --pp and --accum "
     "micro-batches",
     OPTION_TEXT(schedule_file)},
    {"sequence-parallel", NULL,
     "With --tp N: also split the rows of embeddings, residuals and norms over the N ranks",
     OPTION_FLAG(model.own.sequence)},
    MODEL_RECOMPUTE_ROW(model.),
    {"prefetch", "N", "Units gathered ahead (2)", OPTION_INT(prefetch, 0, 10000)},
    {"budget", "BYTES", "For gathered parameters at stage 3 (what prefetch needs)", OPTION_BYTES(budget, 1)},
    {"wire-dtype", "f32|bf16", "The dtype of gradients between ranks (that of the model)",
     OPTION_WORD(wire_dtype, option_dtypes)},
    {"deterministic", "on|off",
     "The same bits at every stage and power-of-two world. It takes more gradient sums: a second one from "
     "3 micro-batches in a step, a third from 7, a fourth from 15 (on; off where the backend is NCCL)",
     OPTION_WORD(deterministic, option_on_off)},
    {.help = "Bytes per parameter:"},
    PRECISION_ROWS(states.),
    STATES_ROW(states.),
    STATES_DIR_ROW(states.),
    {"rounding-seed", "N", "Seed of rounding at random (0)",
     OPTION_INT(states.seed, 0, INT64_C(9007199254740991))},
    {.help = "Checkpoints:"},
    {"save", "DIR", "Save checkpoints into DIR, at the end and as --save-every says", OPTION_TEXT(save)},
    {"save-every", "K", "Also after every K-th step", OPTION_INT(save_every, 1, INT64_MAX / 2)},
    {"save-async", NULL, "Write them while training goes on", OPTION_FLAG(save_async)},
    {"keep", "N", "Keep only the N latest checkpoints in DIR (all)", OPTION_INT(keep, 1, INT32_MAX)},
    {"keep-best", NULL,
     "Save also after an evaluation with a lower loss than all before. The best one's name ends in -kept, "
     "and "
     "--keep does not remove it",
     OPTION_FLAG(keep_best)},
    {"load", "DIR|latest",
     "Go on from a checkpoint, or the latest in DIR; latest: that of --save, or from the start if there is "
     "none yet",
     OPTION_TEXT(load)},
    {"import", "DIR",
     "Begin with the weights in this folder, under Hugging Face's names (the folder of --model)",
     OPTION_TEXT(import_from)},
    {"export", "DIR",
     "At the end, write the weights alone, as zero-bench export does of a checkpoint; with --lora the "
     "adapters, "
     "as the PEFT library does",
     OPTION_TEXT(export_to)},
    {"adapter", "DIR",
     "Begin with the adapters in this folder of PEFT, which says what --lora, --lora-alpha and "
     "--lora-targets "
     "say",
     OPTION_TEXT(adapter)},
    {"export-merged", "DIR", "With adapters: at the end, write the model's weights with the adapters added",
     OPTION_TEXT(export_merged)},
    {.help = "Running:"},
    {"device", "host|cuda", "Where the model computes (host)", OPTION_WORD(device, option_devices)},
    {"gpu", "N", "Which GPU (the rank's number on this host)", OPTION_INT(gpu, 0, 1000)},
    {"threads", "N", "Threads of each rank on the host, for products and layers (1)",
     OPTION_INT(threads, 1, 1024)},
    {"peak-tflops", "X",
     "What the device can do, to tell the share of it that the model's arithmetic takes (MFU); NVIDIA's data "
     "sheets give for dense bf16: A100 312, H100 and H200 SXM 989.4",
     OPTION_DOUBLE(peak_tflops, 1e-6, 1e9)},
    {"plot", "FILE", "Draw the losses into FILE.svg or FILE.png, with gnuplot", OPTION_PLOT(plot)},
    {"trace", "FILE", "Write the reporting rank's timeline to FILE as a Chrome trace, which Perfetto shows",
     OPTION_TEXT(trace)},
    {"json", NULL, "JSON lines only, from the rank that reports", OPTION_FLAG(json)},
    {"log", NULL, "Show libzero's log on stderr", OPTION_FLAG(log)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "Trains a GPT-2 or a Llama on the bytes of text files, or on files of tokens, on as many ranks as "
           "zero-run (or torchrun, mpirun, srun) starts:\n"
           "    zero-run -n 4 zero-bench train --stage 3",
    .args_doc = "[PATH...]",
    .read_word = add_file,
    .finish = finish,
    OPTIONS_WITH_MODEL(struct train_options, model),
};

struct train_options train_defaults(const struct model_options *model)
{
    return (struct train_options){
        .model = *model,
        .dtype = ZERO_F32,
        .batch = 4,
        .accum = 1,
        .steps = 100,
        .seed = 1,
        .end_token = -1,
        .optimizer = ZERO_ADAMW,
        .rate = {.lr = model->default_lr, .warmup = 10},
        .beta1 = 0.9,
        .beta2 = 0.95,
        .weight_decay = 0.1,
        .clip = 1.0,
        .pp = 1,
        .schedule = ZERO_SCHEDULE_1F1B,
        .stages_per_rank = 1,
        .dp_replicate = 1,
        .prefetch = 2,
        .budget = ZERO_AUTO,
        .deterministic = ZERO_AUTO,
        .threads = 1,
        .device = ZERO_DEVICE_HOST,
        .gpu = GPU_OF_LOCAL_RANK,
    };
}

int train_command(const char *name, int argc, char **argv)
{
    struct train_options o = train_defaults(&(struct model_options){0});
    o.rate.lr = o.beta2 = UNSET; /* their defaults follow other options */
    o.steps = -1;
    int status = options_parse(&table, name, argc, argv, &o);
    if (!status)
        status = o.dtype == ZERO_BF16 ? train_run_bf16(&o) : train_run_f32(&o);
    free(o.data.paths);
    free(o.tokens.paths);
    free(o.masks.paths);
    free(o.eval_tokens.paths);
    free(o.eval_masks.paths);
    return status;
}
