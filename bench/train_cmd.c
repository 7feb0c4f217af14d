/* train_cmd.c: the options of zero-bench train. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/place.h"
#include "bench/train.h"

#include <string.h>

#define UNSET (-1.0)

enum {
    KEY_STAGE = 0x300,
    KEY_DTYPE,
    KEY_BATCH,
    KEY_ACCUM,
    KEY_STEPS,
    KEY_SECONDS,
    KEY_SEED,
    KEY_DATA,
    KEY_OPTIMIZER,
    KEY_LR,
    KEY_BETA1,
    KEY_BETA2,
    KEY_WEIGHT_DECAY,
    KEY_CLIP,
    KEY_PREFETCH,
    KEY_BUDGET,
    KEY_DETERMINISTIC,
    KEY_WIRE_DTYPE,
    KEY_THREADS,
    KEY_DEVICE,
    KEY_GPU,
    KEY_PEAK_TFLOPS,
    KEY_PLAIN,
    KEY_JSON,
    KEY_LOG,
    KEY_SAVE,
    KEY_SAVE_EVERY,
    KEY_SAVE_ASYNC,
    KEY_KEEP,
    KEY_LOAD,
    KEY_IMPORT
};

static const struct argp_option train_argp_options[] = {
    {"dtype", KEY_DTYPE, "f32|bf16", 0, "Of weights, gradients and activations (f32)", 1},
    {0, 0, 0, 0, "Training:", 2},
    {"data", KEY_DATA, "PATH", 0,
     "A file of text, or a folder of them; more may follow (the C headers under /usr/include)", 2},
    {"batch", KEY_BATCH, "N", 0, "Rows in a micro-batch of one rank (4)", 2},
    {"accum", KEY_ACCUM, "N", 0, "Micro-batches per step and rank (1)", 2},
    {"steps", KEY_STEPS, "N", 0, "Steps (100; no limit with --seconds)", 2},
    {"seconds", KEY_SECONDS, "N", 0, "Stop at the step during which this long has passed", 2},
    {"optimizer", KEY_OPTIMIZER, "NAME", 0, "adamw (default), adam, sgd or rmsprop", 2},
    {"lr", KEY_LR, "X", 0, "Learning rate, reached over the first 10 steps (one that suits the model)", 2},
    {"beta1", KEY_BETA1, "X", 0, "Of adam; the momentum of sgd (0.9)", 2},
    {"beta2", KEY_BETA2, "X", 0, "Of adam and rmsprop (0.95; rmsprop 0.99)", 2},
    {"weight-decay", KEY_WEIGHT_DECAY, "X", 0, "Of matrices, not of biases and norms (0.1)", 2},
    {"clip", KEY_CLIP, "X", 0, "Largest gradient norm, 0 for none (1)", 2},
    {"seed", KEY_SEED, "N", 0, "Of the weights and of the choice of text (1)", 2},
    {0, 0, 0, 0, "Sharding:", 3},
    {"plain", KEY_PLAIN, NULL, 0, "The same model without libzero, on one rank", 3},
    {"stage", KEY_STAGE, "0..3", 0,
     "What is sharded: nothing, optimizer state, gradients too, parameters too (0)", 3},
    {"prefetch", KEY_PREFETCH, "N", 0, "Units gathered ahead (2)", 3},
    {"budget", KEY_BUDGET, "BYTES", 0, "For gathered parameters at stage 3 (what prefetch needs)", 3},
    {"wire-dtype", KEY_WIRE_DTYPE, "f32|bf16", 0, "Of gradients between ranks (that of the model)", 3},
    {"deterministic", KEY_DETERMINISTIC, "on|off", 0,
     "The same bits at every stage and power-of-two world (on)", 3},
    {0, 0, 0, 0, "Checkpoints:", 4},
    {"save", KEY_SAVE, "DIR", 0, "Save checkpoints into DIR, at the end and as --save-every says", 4},
    {"save-every", KEY_SAVE_EVERY, "K", 0, "Also after every K-th step", 4},
    {"save-async", KEY_SAVE_ASYNC, NULL, 0, "Write them while training goes on", 4},
    {"keep", KEY_KEEP, "N", 0, "Keep only the N latest", 4},
    {"load", KEY_LOAD, "DIR|latest", 0,
     "Go on from a checkpoint, or the latest in DIR; latest: that of --save, or from the start if there is "
     "none yet",
     4},
    {"import", KEY_IMPORT, "DIR", 0,
     "Begin with these weights, as zero-bench export and Hugging Face's GPT-2 have them", 4},
    {0, 0, 0, 0, "Running:", 5},
    {"device", KEY_DEVICE, "host|cuda", 0, "Where the model computes (host)", 5},
    {"gpu", KEY_GPU, "N", 0, "Which GPU (LOCAL_RANK's, else 0)", 5},
    {"threads", KEY_THREADS, "N", 0, "For matrix products on the host, of each rank (1)", 5},
    {"peak-tflops", KEY_PEAK_TFLOPS, "X", 0,
     "What the device can do, to tell the share of it that the model's arithmetic takes (MFU); NVIDIA's data "
     "sheets give for dense bf16: A100 312, H100 and H200 SXM 989.4",
     5},
    {"json", KEY_JSON, NULL, 0, "JSON lines only, from rank 0", 5},
    {"log", KEY_LOG, NULL, 0, "Show libzero's log on stderr", 5},
    {0},
};

static const struct option_word on_off[] = {{"on", 1}, {"off", -1}, {0}};

static error_t add_path(struct train_options *o, char *path)
{
    const char **paths = realloc(o->paths, (size_t)(o->n_paths + 1) * sizeof *paths);
    if (!paths) {
        return ENOMEM;
    }
    o->paths = paths;
    o->paths[o->n_paths++] = path;
    return 0;
}

/* Fills in what was not given, and refuses what does not go together. */
static error_t finish(struct argp_state *state, struct train_options *o)
{
    bool rmsprop = o->optimizer == ZERO_RMSPROP;
    o->lr = o->lr == UNSET ? o->model.default_lr : o->lr;
    o->beta1 = o->beta1 == UNSET ? 0.9 : o->beta1;
    o->beta2 = o->beta2 == UNSET ? (rmsprop ? 0.99 : 0.95) : o->beta2;
    o->steps = o->steps >= 0 ? o->steps : o->seconds > 0 ? INT64_MAX : 100;
    if (o->model.config.vocab < 256) {
        argp_error(state, "--vocab: %lld ids are too few for bytes, which need 256",
                   (long long)o->model.config.vocab);
        return EINVAL;
    }
    if (!o->save && (o->save_every || o->keep || o->save_async || (o->load && !strcmp(o->load, "latest")))) {
        argp_error(state, "--save: is needed by --save-every, --save-async, --keep and --load latest");
        return EINVAL;
    }
    if (o->plain && (o->save || o->load || o->import_from)) {
        argp_error(state, "--plain: saves, loads and imports nothing");
        return EINVAL;
    }
    if (o->plain && o->optimizer != ZERO_ADAMW) {
        argp_error(state, "--optimizer: --plain knows adamw only");
        return EINVAL;
    }
    return 0;
}

static error_t parse_train(int key, char *arg, struct argp_state *state)
{
    struct train_options *o = state->input;
    int64_t n;
    int word;
    error_t err = 0;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &o->model;
        return 0;
    case ARGP_KEY_ARG:
    case KEY_DATA:
        return add_path(o, arg);
    case KEY_DTYPE:
        err = option_word(state, "--dtype", arg, option_dtypes, &word);
        o->dtype = err ? o->dtype : (enum zero_dtype)word;
        return err;
    case KEY_OPTIMIZER:
        err = option_word(state, "--optimizer", arg, option_optimizers, &word);
        o->optimizer = err ? o->optimizer : (enum zero_optimizer)word;
        return err;
    case KEY_STAGE:
        err = option_int(state, "--stage", arg, 0, 3, &n);
        o->stage = err ? o->stage : (int)n;
        return err;
    case KEY_BATCH:
        return option_int(state, "--batch", arg, 1, 1000000, &o->batch);
    case KEY_ACCUM:
        return option_int(state, "--accum", arg, 1, 100000, &o->accum);
    case KEY_STEPS:
        return option_int(state, "--steps", arg, 1, INT64_MAX / 2, &o->steps);
    case KEY_SECONDS:
        return option_double(state, "--seconds", arg, 0.001, 1e9, &o->seconds);
    case KEY_SEED:
        err = option_int(state, "--seed", arg, 0, INT64_MAX, &n);
        o->seed = err ? o->seed : (uint64_t)n;
        return err;
    case KEY_LR:
        return option_double(state, "--lr", arg, 0, 1e6, &o->lr);
    case KEY_BETA1:
        return option_double(state, "--beta1", arg, 0, 0.999999, &o->beta1);
    case KEY_BETA2:
        return option_double(state, "--beta2", arg, 0, 0.999999, &o->beta2);
    case KEY_WEIGHT_DECAY:
        return option_double(state, "--weight-decay", arg, 0, 1e6, &o->weight_decay);
    case KEY_CLIP:
        return option_double(state, "--clip", arg, 0, 1e30, &o->clip);
    case KEY_PREFETCH:
        err = option_int(state, "--prefetch", arg, 0, 10000, &n);
        o->prefetch = err ? o->prefetch : n ? n : -1; /* in struct zero_config 0 means the default */
        return err;
    case KEY_BUDGET:
        return option_bytes(state, "--budget", arg, 1, &o->budget);
    case KEY_WIRE_DTYPE:
        return option_word(state, "--wire-dtype", arg, option_dtypes, &o->wire_dtype);
    case KEY_DETERMINISTIC:
        return option_word(state, "--deterministic", arg, on_off, &o->deterministic);
    case KEY_THREADS:
        err = option_int(state, "--threads", arg, 1, 1024, &n);
        o->threads = err ? o->threads : (int)n;
        return err;
    case KEY_DEVICE:
        return option_word(state, "--device", arg, option_devices, &o->device);
    case KEY_GPU:
        return option_int(state, "--gpu", arg, 0, 1000, &o->gpu);
    case KEY_PEAK_TFLOPS:
        return option_double(state, "--peak-tflops", arg, 1e-6, 1e9, &o->peak_tflops);
    case KEY_PLAIN:
        o->plain = true;
        return 0;
    case KEY_JSON:
        o->json = true;
        return 0;
    case KEY_LOG:
        o->log = true;
        return 0;
    case KEY_SAVE:
        o->save = arg;
        return 0;
    case KEY_SAVE_EVERY:
        return option_int(state, "--save-every", arg, 1, INT64_MAX / 2, &o->save_every);
    case KEY_SAVE_ASYNC:
        o->save_async = true;
        return 0;
    case KEY_KEEP:
        return option_int(state, "--keep", arg, 1, INT32_MAX, &o->keep);
    case KEY_LOAD:
        o->load = arg;
        return 0;
    case KEY_IMPORT:
        o->import_from = arg;
        return 0;
    case ARGP_KEY_SUCCESS:
        return finish(state, o);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int train_command(const char *name, int argc, char **argv)
{
    const struct argp_child children[] = {{&gpt2_config_argp, 0, "Model:", 1}, {0}};
    const struct argp argp = {
        .options = train_argp_options,
        .parser = parse_train,
        .args_doc = "[PATH...]",
        .doc = "Trains a GPT-2 on the bytes of text files, on as many ranks as zero-run (or torchrun, "
               "mpirun, srun) starts.",
        .children = children,
    };
    struct train_options o = {
        .dtype = ZERO_F32,
        .batch = 4,
        .accum = 1,
        .steps = -1,
        .seed = 1,
        .optimizer = ZERO_ADAMW,
        .lr = UNSET,
        .beta1 = UNSET,
        .beta2 = UNSET,
        .weight_decay = 0.1,
        .clip = 1.0,
        .threads = 1,
        .device = ZERO_DEVICE_HOST,
        .gpu = PLACE_GPU_OF_RANK,
    };
    int status = options_parse(&argp, name, argc, argv, &o);
    if (!status) {
        status = o.dtype == ZERO_BF16 ? train_run_bf16(&o) : train_run_f32(&o);
    }
    free(o.paths);
    return status;
}
