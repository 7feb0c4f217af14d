/* export_cmd.c: zero-bench export, the weights of a checkpoint in the files of Hugging Face's libraries,
 * under GPT-2's published names. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/train.h"

enum { KEY_LOAD = 0x300, KEY_OUT, KEY_MAX_FILE, KEY_DTYPE };

static const struct argp_option export_argp_options[] = {
    {"load", KEY_LOAD, "DIR", 0, "A checkpoint, or a folder of them: the latest", 2},
    {"out", KEY_OUT, "DIR", 0, "Where the files go", 2},
    {"max-file", KEY_MAX_FILE, "BYTES", 0, "Of one file (5 GB)", 2},
    {"dtype", KEY_DTYPE, "f32|bf16", 0, "Of the model that was saved (f32)", 2},
    {0},
};

static error_t parse_export(int key, char *arg, struct argp_state *state)
{
    struct train_options *o = state->input;
    int word;
    error_t err;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &o->model;
        return 0;
    case KEY_LOAD:
        o->load = arg;
        return 0;
    case KEY_OUT:
        o->export_to = arg;
        return 0;
    case KEY_MAX_FILE:
        return option_bytes(state, "--max-file", arg, 1, &o->export_max);
    case KEY_DTYPE:
        err = option_word(state, "--dtype", arg, option_dtypes, &word);
        o->dtype = err ? o->dtype : (enum zero_dtype)word;
        return err;
    case ARGP_KEY_SUCCESS:
        if (!o->load || !o->export_to) {
            argp_error(state, "%s: is needed", o->load ? "--out" : "--load");
            return EINVAL;
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int export_command(const char *name, int argc, char **argv)
{
    const struct argp_child children[] = {{&gpt2_config_argp, 0, "Model:", 1}, {0}};
    const struct argp argp = {
        .options = export_argp_options,
        .parser = parse_export,
        .doc = "Writes the weights of a checkpoint as safetensors files under GPT-2's published names: "
               "model-0000i-of-0000N.safetensors and model.safetensors.index.json.",
        .children = children,
    };
    struct train_options o = {.dtype = ZERO_F32,
                              .batch = 1,
                              .accum = 1,
                              .stage = 3,
                              .optimizer = ZERO_ADAMW,
                              .beta1 = 0.9,
                              .beta2 = 0.95,
                              .threads = 1};
    int status = options_parse(&argp, name, argc, argv, &o);
    if (status) {
        return status;
    }
    return o.dtype == ZERO_BF16 ? train_run_bf16(&o) : train_run_f32(&o);
}
