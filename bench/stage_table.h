/* stage_table.h: the four stages side by side, for people. */
#ifndef ZERO_BENCH_STAGE_TABLE_H
#define ZERO_BENCH_STAGE_TABLE_H

#include "zero/zero.h"

#define N_STAGES 4

void stage_table_head(const char *title);
/* A row of bytes, one figure per stage; a negative one is left blank. */
void stage_table_bytes(const char *name, const int64_t bytes[N_STAGES]);
/* A row of times, given in nanoseconds and printed in milliseconds. */
void stage_table_ms(const char *name, const int64_t ns[N_STAGES]);
/* A row for each category that is not zero at all stages, and the total under total_name. */
void stage_table_memory(const struct zero_bytes bytes[N_STAGES], const char *total_name);

#endif
