/* SPDX-License-Identifier: Apache-2.0 */
/* commands.h: the subcommands of zero-bench. A new one needs a function here, a line in main.c's table,
 * and a file. */
#ifndef ZERO_BENCH_COMMANDS_H
#define ZERO_BENCH_COMMANDS_H

/* Each gets its own arguments, with the subcommand as argv[0], and the name for messages ("zero-bench
 * train"). Returns the exit code: 0; 1 for a failure; 2 (EXIT_USAGE) for options, values and data that
 * cannot be used. A code above 0 follows one line on stderr. */
int train_command(const char *name, int argc, char **argv);
int plan_command(const char *name, int argc, char **argv);
int tokenize_command(const char *name, int argc, char **argv);
int tune_command(const char *name, int argc, char **argv);
int memory_command(const char *name, int argc, char **argv);
int comm_command(const char *name, int argc, char **argv);
int kernels_command(const char *name, int argc, char **argv);
int profile_command(const char *name, int argc, char **argv);
int verify_command(const char *name, int argc, char **argv);
int sample_command(const char *name, int argc, char **argv);
int export_command(const char *name, int argc, char **argv);
int flight_command(const char *name, int argc, char **argv);
int scale_command(const char *name, int argc, char **argv);
int pipeline_command(const char *name, int argc, char **argv);
int checkpoint_command(const char *name, int argc, char **argv);

#endif
