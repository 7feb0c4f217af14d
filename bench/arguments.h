/* arguments.h: what the subcommands share in reading their command lines: argp, with every mistake told in
 * one line. */
#ifndef ZERO_BENCH_ARGUMENTS_H
#define ZERO_BENCH_ARGUMENTS_H

#include <argp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define EXIT_USAGE 2 /* of bad options, bad values and unreadable data */

/* argp_parse() with --help added; name ("zero-bench train") goes before messages. Returns 0, or EXIT_USAGE
 * after one line on stderr. --help prints to stdout and ends the program with 0. */
int options_parse(const struct argp *argp, const char *name, int argc, char **argv, void *input);

/* Reads arg into *out, or tells what is allowed through argp_error() and returns EINVAL. Integers may be
 * written as 1e6; bytes may end in K, M, G or T (powers of 1024). */
error_t option_int(struct argp_state *state, const char *name, const char *arg, int64_t min, int64_t max,
                   int64_t *out);
error_t option_bytes(struct argp_state *state, const char *name, const char *arg, int64_t min, int64_t *out);
error_t option_double(struct argp_state *state, const char *name, const char *arg, double min, double max,
                      double *out);

/* One of a set of words. */
struct option_word {
    const char *word;
    int value;
};
/* words: ended by a NULL word. */
error_t option_word(struct argp_state *state, const char *name, const char *arg,
                    const struct option_word *words, int *out);

extern const struct option_word option_dtypes[];                        /* f32, bf16: enum zero_dtype */
extern const struct option_word option_devices[];                       /* host, cuda: enum zero_device */
extern const struct option_word option_optimizers[];                    /* adamw, ...: enum zero_optimizer */
const char *option_word_of(const struct option_word *words, int value); /* the reverse; "unknown" if none */

#endif
