/* SPDX-License-Identifier: Apache-2.0 */
/* arguments.c: reads command lines by argp. argp reports a mistake in two lines, and getopt_long inside it
 * writes to stderr itself. Both are caught in memory, and only the first line is passed on. */
#include "bench/arguments.h"

#include "bench/hybrids.h"
#include "zero/zero.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { KEY_HELP = 0x100, KEY_FIRST_ROW = 0x200 };

/* A table, and the struct that it fills: argp's input for read_key. */
struct reading {
    const struct option_table *table;
    char *to;
    int n_rows;                  /* of the table, headings included */
    struct argp_option *options; /* (n_rows + 2): the rows, --help in a command's table, the end */
    struct reading *shared;      /* of the table whose options come first; NULL: none */
};

/* Called by argp for each option, word and event (an argp_parser_t). */
static error_t read_key(int key, char *arg, struct argp_state *state)
{
    const struct reading *r = state->input;
    const struct option_table *t = r->table;
    switch (key) {
    case ARGP_KEY_INIT:
        if (r->shared)
            state->child_inputs[0] = r->shared;
        return 0;
    case KEY_HELP:
        argp_state_help(state, stdout,
                        ARGP_HELP_USAGE | ARGP_HELP_LONG | ARGP_HELP_PRE_DOC | ARGP_HELP_POST_DOC);
        fflush(stdout);
        exit(0);
    case ARGP_KEY_ARG:
        return t->read_word ? t->read_word(state, NULL, arg, r->to) : ARGP_ERR_UNKNOWN;
    case ARGP_KEY_SUCCESS:
        return t->finish ? t->finish(state, r->to) : 0;
    default:
        if (key < KEY_FIRST_ROW || key >= KEY_FIRST_ROW + r->n_rows)
            return ARGP_ERR_UNKNOWN;
        const struct option_row *row = &t->rows[key - KEY_FIRST_ROW];
        return row->read(state, row, arg, r->to + row->at);
    }
}

/* Translates a table into argp's options. */
static struct reading reading_of(const struct option_table *table, void *to)
{
    struct reading r = {.table = table, .to = to};
    while (table->rows[r.n_rows].help)
        r.n_rows++;
    r.options = calloc((size_t)r.n_rows + 2, sizeof *r.options);
    for (int i = 0, group = 1; r.options && i < r.n_rows; i++) {
        const struct option_row *row = &table->rows[i];
        group = row->group ? row->group : group + !row->name;
        r.options[i] = (struct argp_option){
            row->name, row->name ? KEY_FIRST_ROW + i : 0, row->metavar, 0, row->help, group};
    }
    return r;
}

int options_parse(const struct option_table *table, const char *name, int argc, char **argv, void *options)
{
    struct reading own = reading_of(table, options), shared = {0};
    struct argp shared_argp = {.parser = read_key};
    struct argp_child children[] = {{0}, {0}};
    if (table->shared) {
        shared = reading_of(table->shared, own.to + table->shared_at);
        own.shared = &shared;
        shared_argp.options = shared.options;
        children[0] = (struct argp_child){&shared_argp, 0, table->shared->header, 1};
    }
    char *own_name = argv[0], *text = NULL;
    size_t text_bytes = 0;
    FILE *terminal = stderr, *caught = open_memstream(&text, &text_bytes);
    error_t err = ENOMEM;
    if (caught && own.options && (shared.options || !own.shared)) {
        own.options[own.n_rows] = (struct argp_option){"help", KEY_HELP, NULL, 0, "Print this help", -1};
        const struct argp argp = {own.options, read_key, .args_doc = table->args_doc, .doc = table->doc,
                                  .children = children};
        argv[0] = (char *)name;
        stderr = caught;
        err = argp_parse(&argp, argc, argv, ARGP_NO_EXIT | ARGP_NO_HELP | ARGP_IN_ORDER, NULL, &own);
        stderr = terminal;
        argv[0] = own_name;
    }
    if (caught)
        fclose(caught);
    if (err) {
        int line = text ? (int)strcspn(text, "\n") : 0;
        if (line)
            fprintf(stderr, "%.*s\n", line, text);
        else
            fprintf(stderr, "%s: %s\n", name, strerror(err));
    }
    free(text);
    free(own.options);
    free(shared.options);
    return err ? EXIT_USAGE : 0;
}

error_t option_fault(struct argp_state *state, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    argp_error(state, "%s", text);
    return EINVAL;
}

error_t option_refuse_word(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    (void)row, (void)to;
    return option_fault(state, "'%s' is not an option", arg);
}

error_t option_flag(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    (void)state, (void)row, (void)arg;
    *(bool *)to = true;
    return 0;
}

error_t option_text(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    (void)state, (void)row;
    *(const char **)to = arg;
    return 0;
}

error_t option_double(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    char *end;
    double v = strtod(arg, &end);
    if (end == arg || *end || !(v >= row->least && v <= row->most))
        return option_fault(state, "--%s: '%s' is not a number from %g to %g", row->name, arg, row->least,
                            row->most);
    *(double *)to = v;
    return 0;
}

error_t option_int(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    char *end;
    errno = 0;
    long long v = strtoll(arg, &end, 10);
    if (*end) { /* a whole number such as 7.5e9, which a double holds exactly */
        double d = strtod(arg, &end);
        errno = errno || !(fabs(d) <= 9e15) || d != floor(d) ? ERANGE : 0;
        v = errno ? 0 : (long long)d;
    }
    if (end == arg || *end || errno || v < row->min || v > row->max)
        return option_fault(state, "--%s: '%s' is not a whole number from %lld to %lld", row->name, arg,
                            (long long)row->min, (long long)row->max);
    *(int64_t *)to = v;
    return 0;
}

error_t option_int_or_auto(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    if (strcmp(arg, "auto") != 0)
        return option_int(state, row, arg, to);
    *(int64_t *)to = ZERO_AUTO;
    return 0;
}

error_t option_bytes(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    char *end, one[16];
    double v = strtod(arg, &end);
    struct zero_config unit = ZERO_CONFIG_INIT;
    int length = snprintf(one, sizeof one, "1%s", end); /* libzero itself reads only whole numbers */
    if (end == arg || length >= (int)sizeof one || zero_config_set(&unit, "param_budget_bytes", one))
        v = NAN;
    v *= (double)unit.memory.param_budget_bytes;
    if (!(v >= (double)row->min && v <= 9e18))
        return option_fault(state,
                            "--%s: '%s' is not a number of bytes of at least %lld (k, M, G, T or Ki, Mi, Gi, "
                            "Ti may follow)",
                            row->name, arg, (long long)row->min);
    *(int64_t *)to = (int64_t)v;
    return 0;
}

const char *const option_layout_variables[] = {"ZERO_STAGE",
                                               "ZERO_HYBRID",
                                               "ZERO_DP_REPLICATE",
                                               "ZERO_DP_SHARD",
                                               "ZERO_TP",
                                               "ZERO_CP",
                                               "ZERO_PP",
                                               "ZERO_SCHEDULE",
                                               "ZERO_STAGES_PER_RANK",
                                               "ZERO_DEVICE",
                                               "ZERO_MASTERS",
                                               "ZERO_MOMENTS",
                                               "ZERO_STATES",
                                               "ZERO_GRAD_SUM_DTYPE",
                                               "ZERO_GRAD_ACCUM_STEPS",
                                               NULL};

const char *option_set_variable(const char *const *names)
{
    for (; *names; names++) {
        const char *value = getenv(*names);
        if (value && *value)
            return *names;
    }
    return NULL;
}

void option_list(char *text, size_t text_bytes, const char *word, bool last)
{
    size_t used = strlen(text);
    const char *join = !used ? "" : last ? " or " : ", ";
    snprintf(text + used, text_bytes - used, "%s%s", join, word);
}

error_t option_one_of(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    char allowed[256] = "";
    for (const struct option_word *w = row->words; w->word; w++) {
        if (!strcmp(w->word, arg)) {
            *(int *)to = w->value;
            return 0;
        }
        option_list(allowed, sizeof allowed, w->word, !w[1].word);
    }
    return option_fault(state, "--%s: '%s' is not %s", row->name, arg, allowed);
}

const struct option_word option_dtypes[] = {{"f32", ZERO_F32}, {"bf16", ZERO_BF16}, {0}};

const struct option_word option_devices[] = {{"host", ZERO_DEVICE_HOST}, {"cuda", ZERO_DEVICE_CUDA}, {0}};

const struct option_word option_hybrid[] = {{"hsdp", ZERO_HSDP}, {"hfsdp", ZERO_HFSDP}, {0}};

const struct option_word option_hybrids[] = {
    {"none", HYBRID_NONE}, {"hsdp", HYBRID_HSDP}, {"hfsdp", HYBRID_HFSDP}, {0}};

const struct option_word option_on_off[] = {{"on", 1}, {"off", 0}, {0}};

#define WORD(name, value, key, text) {#key, value},
const struct option_word option_optimizers[] = {ZERO_OPTIMIZER_MAP(WORD){0}};
#undef WORD

const char *option_word_of(const struct option_word *words, int value)
{
    for (; words->word; words++)
        if (words->value == value)
            return words->word;
    return "unknown";
}
