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

/* A column's title, such as "stage 2" or "HSDP". text is used for titles that are not constant. */
enum { STAGE_TABLE_NAME = 24 };
const char *column_name(int column, char text[STAGE_TABLE_NAME]);

/* All tables have n columns: N_STAGES, or N_COLUMNS with the hybrids. */
void stage_table_head(const char *title, int n);
/* A row of bytes. Negative figures are left blank. */
void stage_table_bytes(const char *name, const int64_t *bytes, int n);
/* A row of numbers. */
void stage_table_counts(const char *name, const int64_t *count, int n);
/* A row of times, given in nanoseconds and printed in milliseconds. */
void stage_table_ms(const char *name, const int64_t *ns, int n);
/* A row for each category that any column has, and the total under total_name. */
void stage_table_memory(const struct zero_bytes *bytes, const char *total_name, int n);

#endif
