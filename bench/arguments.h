/* SPDX-License-Identifier: Apache-2.0 */
/* arguments.h: the command lines of all subcommands. Each is a table with a row per option. Mistakes are
 * reported in one line. */
#ifndef ZERO_BENCH_ARGUMENTS_H
#define ZERO_BENCH_ARGUMENTS_H

#include <argp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EXIT_USAGE 2 /* for wrong options, wrong values and unreadable data */

/* One of a set of words. */
struct option_word {
    const char *word;
    int value;
};

/* Reads arg (NULL for a flag) into *to, which is row->at bytes into the command's struct. If arg is wrong,
 * it returns option_fault(), which says what is allowed. */
struct option_row;
typedef error_t option_reader(struct argp_state *state, const struct option_row *row, char *arg, void *to);

/* An option. A row without a name is the heading of a group in --help. */
struct option_row {
    /* without the dashes */
    const char *name;
    /* the value's name in --help; NULL: a flag, without a value */
    const char *metavar;
    const char *help;

    option_reader *read;
    /* offset of the value in the command's struct */
    size_t at;
    /* range of OPTION_INT and OPTION_BYTES */
    int64_t min, max;
    /* range of OPTION_DOUBLE */
    double least, most;
    /* values of OPTION_WORD, ended by a NULL word */
    const struct option_word *words;

    /* --help lists options by group. The first row starts group 1, and a heading starts the next group.
     * Another row starts the group that it names; 0: it belongs to the group of the row before it. */
    int group;
};

/* The offset of a field in struct S. This does not compile for a field of a type that is not named, because
 * _Generic has no case for that type. */
#define OPTION_AT(S, field, ...) (offsetof(S, field) + _Generic(((S *)0)->field, __VA_ARGS__))

/* The end of a row: the kind of value, and the field that it fills. The file defines OPTION_STRUCT, the
 * struct with the field, before the rows. */

/* A whole number, which may be written as 1e6. For a uint64_t, `from` must not be negative. */
#define OPTION_INT(field, from, to)                                                                          \
    .read = option_int, .at = OPTION_AT(OPTION_STRUCT, field, int64_t : 0, uint64_t : 0), .min = (from),     \
    .max = (to)
/* The same, or "auto", which is ZERO_AUTO. */
#define OPTION_INT_OR_AUTO(field, from, to)                                                                  \
    .read = option_int_or_auto, .at = OPTION_AT(OPTION_STRUCT, field, int64_t : 0), .min = (from), .max = (to)
/* Bytes, which may have a fraction and end in a unit of zero_config_set: "1.5G" or "64Ki". */
#define OPTION_BYTES(field, from)                                                                            \
    .read = option_bytes, .at = OPTION_AT(OPTION_STRUCT, field, int64_t : 0), .min = (from)
#define OPTION_DOUBLE(field, from, to)                                                                       \
    .read = option_double, .at = OPTION_AT(OPTION_STRUCT, field, double : 0), .least = (from), .most = (to)
/* One of a set of words, into an int or an enum. */
#define OPTION_WORD(field, set)                                                                              \
    .read = option_one_of, .at = OPTION_AT(OPTION_STRUCT, field, int : 0, unsigned : 0), .words = (set)
#define OPTION_FLAG(field) .read = option_flag, .at = OPTION_AT(OPTION_STRUCT, field, bool : 0)
/* The argument itself, not a copy. */
#define OPTION_TEXT(field) .read = option_text, .at = OPTION_AT(OPTION_STRUCT, field, const char * : 0)
/* A function of the command, which gets the whole struct as *to. */
#define OPTION_BY(function) .read = (function)

option_reader option_int, option_int_or_auto, option_bytes, option_double, option_one_of, option_flag,
    option_text;

/* The options of a command, or options that several commands share. */
struct option_table {
    /* ended by a row without help */
    const struct option_row *rows;
    /* title in --help of a shared table */
    const char *header;
    /* for a command: its texts in argp's form */
    const char *doc, *args_doc;
    /* reads a word that is not an option, with row NULL and the whole struct; NULL: such words are refused */
    option_reader *read_word;
    /* Called when everything is read. It fills in defaults, and refuses options that do not go together,
     * as a reader does. The shared table's is called first. NULL: nothing to do. */
    error_t (*finish)(struct argp_state *state, void *options);
    /* a table whose options come first in --help; it must not share another one itself; NULL: none */
    const struct option_table *shared;
    /* offset of its struct in the command's */
    size_t shared_at;
};

/* Reports a mistake in one line. Returns EINVAL, which a reader or a finish returns in turn. */
error_t option_fault(struct argp_state *state, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* A read_word that says that the word is not an option. */
option_reader option_refuse_word;

/* Reads the command line into *options. name ("zero-bench train") begins messages. Returns 0, or
 * EXIT_USAGE after one line on stderr. --help prints to stdout and ends the program with 0. */
int options_parse(const struct option_table *table, const char *name, int argc, char **argv, void *options);

/* All optimizers for --help: " adamw adam ...". */
#define OPTION_OPTIMIZER(name, value, key, text) " " #key
#define OPTION_OPTIMIZERS                        ZERO_OPTIMIZER_MAP(OPTION_OPTIMIZER)
/* Words of enum zero_dtype: f32 and bf16. */
extern const struct option_word option_dtypes[];
/* Words of enum zero_device: host and cuda. */
extern const struct option_word option_devices[];
/* Words of enum zero_optimizer: adamw and so on. */
extern const struct option_word option_optimizers[];
/* Words of enum zero_hybrid: hsdp and hfsdp. */
extern const struct option_word option_hybrid[];
/* Words of enum hybrid, for the result of a run or a plan: none, hsdp and hfsdp. */
extern const struct option_word option_hybrids[];
/* on is 1, off is 0. */
extern const struct option_word option_on_off[];
/* The word of a value, or "unknown". */
const char *option_word_of(const struct option_word *words, int value);

/* Variables of the layout and of precision. They would override what a command tries one after another. */
extern const char *const option_layout_variables[];
/* Returns the first of these environment variables that is set and not empty, or NULL. names ends with
 * NULL. */
const char *option_set_variable(const char *const *names);

/* Adds a word to a list such as "host, cuda or tpu". Text that does not fit is cut. */
void option_list(char *text, size_t text_bytes, const char *word, bool last);

#endif
