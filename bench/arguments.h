/* SPDX-License-Identifier: Apache-2.0 */
/* arguments.h: the subcommands' command lines, each a table with a row per option, read by argp with every
 * mistake told in one line. */
#ifndef ZERO_BENCH_ARGUMENTS_H
#define ZERO_BENCH_ARGUMENTS_H

#include <argp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EXIT_USAGE 2 /* of bad options, bad values and unreadable data */

/* One of a set of words. */
struct option_word {
    const char *word;
    int value;
};

/* Reads arg (NULL for a flag) into *to, which is row->at bytes into the command's struct; or tells what is
 * allowed through argp_error(), returns EINVAL and leaves *to alone. */
struct option_row;
typedef error_t option_reader(struct argp_state *state, const struct option_row *row, char *arg, void *to);

/* An option; without a name, a heading of its group in --help. */
struct option_row {
    /* without the dashes */
    const char *name;
    /* what --help calls the value; NULL: a flag, which has none */
    const char *metavar;
    const char *help;
    /* of --help, from 1 */
    int group;

    option_reader *read;
    /* where the value is in the command's struct */
    size_t at;
    /* allowed for OPTION_INT and OPTION_BYTES */
    int64_t min, max;
    /* allowed for OPTION_DOUBLE */
    double least, most;
    /* allowed for OPTION_WORD, ended by a NULL word */
    const struct option_word *words;
};

/* Where a field is in the struct S. One of a type other than those named does not compile, since _Generic has
 * no case for it. */
#define OPTION_AT(S, field, ...) (offsetof(S, field) + _Generic(((S *)0)->field, __VA_ARGS__))

/* What a row ends with: what its option may be, and the field that it fills in. */

/* A whole number, which may be written as 1e6. A uint64_t wants from to be 0 or more. */
#define OPTION_INT(S, field, from, to)                                                                       \
    .read = option_int, .at = OPTION_AT(S, field, int64_t : 0, uint64_t : 0), .min = (from), .max = (to)
/* The same, or auto, which is ZERO_AUTO. */
#define OPTION_INT_OR_AUTO(S, field, from, to)                                                               \
    .read = option_int_or_auto, .at = OPTION_AT(S, field, int64_t : 0), .min = (from), .max = (to)
/* Bytes, which may end in K, M, G or T (powers of 1024). */
#define OPTION_BYTES(S, field, from)                                                                         \
    .read = option_bytes, .at = OPTION_AT(S, field, int64_t : 0), .min = (from)
#define OPTION_DOUBLE(S, field, from, to)                                                                    \
    .read = option_double, .at = OPTION_AT(S, field, double : 0), .least = (from), .most = (to)
/* One of a set of words, into an int or an enum. */
#define OPTION_WORD(S, field, set)                                                                           \
    .read = option_one_of, .at = OPTION_AT(S, field, int : 0, unsigned : 0), .words = (set)
#define OPTION_FLAG(S, field) .read = option_flag, .at = OPTION_AT(S, field, bool : 0)
/* The argument itself, not a copy. */
#define OPTION_TEXT(S, field) .read = option_text, .at = OPTION_AT(S, field, const char * : 0)
/* An odd one: a function of the command, to which *to is the whole struct. */
#define OPTION_BY(function) .read = (function)

option_reader option_int, option_int_or_auto, option_bytes, option_double, option_one_of, option_flag,
    option_text;

/* The options of a command, or those that several commands share. */
struct option_table {
    /* ended by a row without help */
    const struct option_row *rows;
    /* of a shared table: its title in --help */
    const char *header;
    /* of a command: as argp takes them */
    const char *doc, *args_doc;
    /* reads a word that is no option, with row NULL and at the whole struct; NULL: such a word is refused */
    option_reader *read_word;
    /* Called when all is read: fills in what was not given, and refuses what does not go together as a reader
     * does. NULL: nothing to do. The shared table's comes first. */
    error_t (*finish)(struct argp_state *state, void *options);
    /* a table whose options come first in --help, and which has no shared one itself; NULL: none */
    const struct option_table *shared;
    /* where its struct is in the command's */
    size_t shared_at;
};

/* Tells a mistake in one line, and returns EINVAL: for a reader or a finish to return. */
error_t option_fault(struct argp_state *state, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* A read_word that says the word is not an option. */
option_reader option_refuse_word;

/* Reads the command line into *options; name ("zero-bench train") goes before messages. Returns 0, or
 * EXIT_USAGE after one line on stderr. --help, which every command has, prints to stdout and ends the program
 * with 0. */
int options_parse(const struct option_table *table, const char *name, int argc, char **argv, void *options);

/* Their names for --help: " adamw adam ...". */
#define OPTION_OPTIMIZER(name, value, key, text) " " #key
#define OPTION_OPTIMIZERS                        ZERO_OPTIMIZER_MAP(OPTION_OPTIMIZER)
/* f32 and bf16, of enum zero_dtype. */
extern const struct option_word option_dtypes[];
/* host and cuda, of enum zero_device. */
extern const struct option_word option_devices[];
/* adamw and so on, of enum zero_optimizer. */
extern const struct option_word option_optimizers[];
/* hsdp and hfsdp, of enum zero_hybrid. */
extern const struct option_word option_hybrid[];
/* none, hsdp and hfsdp, of enum hybrid: what a run or a plan came to. */
extern const struct option_word option_hybrids[];
/* on is 1, off is 0. */
extern const struct option_word option_on_off[];
/* The word of a value; "unknown" if there is none. */
const char *option_word_of(const struct option_word *words, int value);

/* Adds a word to a list such as "host, cuda or tpu"; text is cut where text_bytes are full. */
void option_list(char *text, size_t text_bytes, const char *word, bool last);

#endif
