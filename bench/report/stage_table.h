/* SPDX-License-Identifier: Apache-2.0 */
/* stage_table.h: tables for people, with a column for each of the four stages, and after them for the
 * hybrids. */
#ifndef ZERO_BENCH_STAGE_TABLE_H
#define ZERO_BENCH_STAGE_TABLE_H

#include "bench/hybrids.h"

/* Columns: the stages, and after them HSDP and HFSDP. */
#define N_STAGES  4
#define N_HYBRIDS 2
#define N_COLUMNS (N_STAGES + N_HYBRIDS)

/* A column's stage, and its enum hybrid. */
static inline int stage_of_column(int column)
{
    return column < N_STAGES ? column : N_STAGES - 1;
}

static inline int hybrid_of_column(int column)
{
    return column < N_STAGES ? HYBRID_NONE : HYBRID_HSDP + column - N_STAGES;
}

/* Writes a column's title, such as "stage 2" or "HSDP". */
enum { STAGE_TABLE_NAME = 24 };
void column_name(int column, char text[STAGE_TABLE_NAME]);

/* Print the head of a table of n columns: N_STAGES, or N_COLUMNS with the hybrids. stage_table_titles takes
 * other columns, at most N_COLUMNS, with titles of at most 10 characters. */
void stage_table_head(const char *title, int n);
void stage_table_titles(const char *title, const char (*names)[STAGE_TABLE_NAME], int n);
/* A row of bytes. Negative figures are left blank. */
void stage_table_bytes(const char *name, const int64_t *bytes, int n);
/* A row of numbers. */
void stage_table_counts(const char *name, const int64_t *count, int n);
/* A row of numbers, with n_decimals decimals. What rounds to zero has no sign. */
void stage_table_numbers(const char *name, const double *number, int n_decimals, int n);
/* A row of times, given in nanoseconds and printed in milliseconds. */
void stage_table_ms(const char *name, const int64_t *ns, int n);
/* A row for each category that any column has, and the total under total_name. */
void stage_table_memory(const struct zero_bytes *bytes, const char *total_name, int n);

#endif
