/* SPDX-License-Identifier: Apache-2.0 */
/* main.c: zero-bench SUBCOMMAND, the measuring, planning and comparing tools of libzero. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "zero/zero.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *summary;
    int (*run)(const char *name, int argc, char **argv);
} commands[] = {
    {"train", "train a GPT-2 or a Llama, at any stage, and say what it took", train_command},
    {"tokenize", "text files as a file of token ids, by the tokenizer of a Hugging Face folder",
     tokenize_command},
    {"sample", "text that a trained model generates", sample_command},
    {"plan", "memory and traffic of every stage for a model and a number of ranks, without running it",
     plan_command},
    {"tune", "choose stage, hybrid, prefetch, budget and wire dtype for a model, a world and a memory limit",
     tune_command},
    {"memory", "run the stages for real and compare planned, allocated and resident memory", memory_command},
    {"checkpoint", "how fast checkpoints are saved and loaded, beside dd on the same disk",
     checkpoint_command},
    {"export", "weights of a checkpoint in Hugging Face's files", export_command},
    {"kernels", "how fast a device copies, updates weights by AdamW, and multiplies matrices",
     kernels_command},
    {"profile", "where the steps of a training on the host go, beside what the machine can do at most",
     profile_command},
    {"comm", "how fast ranks gather and reduce, beside what the machine copies and adds", comm_command},
    {"flight", "what the ranks of a job did last: who is dead, different or late, and in which call",
     flight_command},
    {"scale", "what a step takes on up to 16,384 GPUs, on paper: time, memory, exposed communication",
     scale_command},
    {"pipeline", "a pipeline schedule, named or read: checked, timed and drawn before anything runs",
     pipeline_command},
    {"verify", "prove the schedule on a simulated device: random configurations, mutants, every interleaving",
     verify_command},
};
#define N_COMMANDS (sizeof commands / sizeof commands[0])

static void help(void)
{
    printf("Usage: zero-bench SUBCOMMAND [OPTION...]\n\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        printf("  %-10s %s\n", commands[i].name, commands[i].summary);
    printf("\nzero-bench SUBCOMMAND --help tells the options. Run on several ranks with zero-run -n N "
           "zero-bench ...\n"
           "libzero %s\n",
           zero_version());
}

/* All names, such as "train, plan or memory". */
static const char *names(void)
{
    static char text[256];
    for (size_t i = 0; i < N_COMMANDS; i++)
        option_list(text, sizeof text, commands[i].name, i + 1 == N_COMMANDS);
    return text;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "zero-bench: give a subcommand: %s (--help tells more)\n", names());
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "help")) {
        help();
        return 0;
    }
    if (!strcmp(argv[1], "--version")) {
        printf("zero-bench %s\n", zero_version());
        return 0;
    }
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (!strcmp(argv[1], commands[i].name)) {
            char name[64];
            snprintf(name, sizeof name, "zero-bench %s", commands[i].name);
            return commands[i].run(name, argc - 1, argv + 1);
        }
    }
    fprintf(stderr, "zero-bench: '%s' is not %s\n", argv[1], names());
    return EXIT_USAGE;
}
