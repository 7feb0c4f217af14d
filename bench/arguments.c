/* arguments.c: see arguments.h. argp tells a mistake in two lines (what, and "Try ..."), getopt_long inside
 * it writes its own to stderr; both are caught in memory and only the first line passed on. */
#include "bench/arguments.h"

#include "zero/zero.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_CHILDREN 4
enum { KEY_HELP = 0x100 };

static const struct argp_option help_options[] = {
    {"help", KEY_HELP, NULL, 0, "Print this help", -1},
    {0},
};

static error_t parse_help(int key, char *arg, struct argp_state *state)
{
    (void)arg;
    if (key != KEY_HELP) {
        return ARGP_ERR_UNKNOWN;
    }
    argp_state_help(state, stdout, ARGP_HELP_USAGE | ARGP_HELP_LONG | ARGP_HELP_PRE_DOC | ARGP_HELP_POST_DOC);
    fflush(stdout);
    exit(0);
}

static const struct argp help_argp = {.options = help_options, .parser = parse_help};

int options_parse(const struct argp *argp, const char *name, int argc, char **argv, void *input)
{
    struct argp_child children[MAX_CHILDREN + 2] = {0};
    int n = 0;
    for (const struct argp_child *c = argp->children; c && c->argp && n < MAX_CHILDREN; c++) {
        children[n++] = *c;
    }
    children[n] = (struct argp_child){.argp = &help_argp};
    struct argp with_help = *argp;
    with_help.children = children;

    char *own_name = argv[0], *text = NULL;
    size_t text_bytes = 0;
    FILE *terminal = stderr, *caught = open_memstream(&text, &text_bytes);
    if (!caught) {
        fprintf(stderr, "%s: not enough memory to read the options\n", name);
        return EXIT_USAGE;
    }
    argv[0] = (char *)name;
    stderr = caught;
    error_t err = argp_parse(&with_help, argc, argv, ARGP_NO_EXIT | ARGP_NO_HELP, NULL, input);
    stderr = terminal;
    argv[0] = own_name;
    fclose(caught);
    if (err) {
        int line = (int)strcspn(text, "\n");
        if (line) {
            fprintf(stderr, "%.*s\n", line, text);
        } else {
            fprintf(stderr, "%s: %s\n", name, strerror(err));
        }
    }
    free(text);
    return err ? EXIT_USAGE : 0;
}

error_t option_double(struct argp_state *state, const char *name, const char *arg, double min, double max,
                      double *out)
{
    char *end;
    double v = strtod(arg, &end);
    if (end == arg || *end || !(v >= min && v <= max)) {
        argp_error(state, "%s: '%s' is not a number from %g to %g", name, arg, min, max);
        return EINVAL;
    }
    *out = v;
    return 0;
}

error_t option_int(struct argp_state *state, const char *name, const char *arg, int64_t min, int64_t max,
                   int64_t *out)
{
    char *end;
    errno = 0;
    long long v = strtoll(arg, &end, 10);
    if (*end) { /* 7.5e9, 1e6: whole numbers that a double holds exactly */
        double d = strtod(arg, &end);
        errno = errno || !(fabs(d) <= 9e15) || d != floor(d) ? ERANGE : 0;
        v = errno ? 0 : (long long)d;
    }
    if (end == arg || *end || errno || v < min || v > max) {
        argp_error(state, "%s: '%s' is not a whole number from %lld to %lld", name, arg, (long long)min,
                   (long long)max);
        return EINVAL;
    }
    *out = v;
    return 0;
}

error_t option_bytes(struct argp_state *state, const char *name, const char *arg, int64_t min, int64_t *out)
{
    static const char suffixes[] = "KMGT";
    char *end;
    double v = strtod(arg, &end);
    const char *s = end != arg && *end ? strchr(suffixes, *end) : NULL;
    for (const char *p = suffixes; s && p <= s; p++) {
        v *= 1024;
    }
    end += s != NULL;
    if (end == arg || *end || !(v >= (double)min && v <= 9e18)) {
        argp_error(state, "%s: '%s' is not a number of bytes of at least %lld (K, M, G, T may follow)", name,
                   arg, (long long)min);
        return EINVAL;
    }
    *out = (int64_t)v;
    return 0;
}

error_t option_word(struct argp_state *state, const char *name, const char *arg,
                    const struct option_word *words, int *out)
{
    char allowed[256] = "";
    for (const struct option_word *w = words; w->word; w++) {
        if (!strcmp(w->word, arg)) {
            *out = w->value;
            return 0;
        }
        size_t used = strlen(allowed);
        const char *join = w == words ? "" : w[1].word ? ", " : " or ";
        snprintf(allowed + used, sizeof allowed - used, "%s%s", join, w->word);
    }
    argp_error(state, "%s: '%s' is not %s", name, arg, allowed);
    return EINVAL;
}

const struct option_word option_dtypes[] = {{"f32", ZERO_F32}, {"bf16", ZERO_BF16}, {0}};

const struct option_word option_devices[] = {{"host", ZERO_DEVICE_HOST}, {"cuda", ZERO_DEVICE_CUDA}, {0}};

const struct option_word option_optimizers[] = {
    {"adamw", ZERO_ADAMW}, {"adam", ZERO_ADAM}, {"sgd", ZERO_SGD}, {"rmsprop", ZERO_RMSPROP}, {0},
};

const char *option_word_of(const struct option_word *words, int value)
{
    for (; words->word; words++) {
        if (words->value == value) {
            return words->word;
        }
    }
    return "unknown";
}
