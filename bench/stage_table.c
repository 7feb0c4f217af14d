/* stage_table.c: see stage_table.h. */
#include "bench/stage_table.h"
#include "bench/report.h"

#include <stdio.h>

void stage_table_head(const char *title)
{
    printf("%-22s", title);
    for (int s = 0; s < N_STAGES; s++)
        printf("    stage %d", s);
    putchar('\n');
}

void stage_table_bytes(const char *name, const int64_t bytes[N_STAGES])
{
    printf("%-22s", name);
    for (int s = 0; s < N_STAGES; s++)
        printf(" %10s", bytes[s] < 0 ? "" : report_bytes(bytes[s]).text);
    putchar('\n');
}

void stage_table_ms(const char *name, const int64_t ns[N_STAGES])
{
    printf("%-22s", name);
    for (int s = 0; s < N_STAGES; s++)
        printf(" %7.2f ms", (double)ns[s] / 1e6);
    putchar('\n');
}

void stage_table_memory(const struct zero_bytes bytes[N_STAGES], const char *total_name)
{
    int64_t row[N_STAGES], any;
#define ROW(field, text)                                                                                     \
    any = 0;                                                                                                 \
    for (int s = 0; s < N_STAGES; s++) {                                                                     \
        row[s] = bytes[s].field;                                                                             \
        any |= row[s];                                                                                       \
    }                                                                                                        \
    if (any)                                                                                                 \
        stage_table_bytes(text, row);
    ZERO_MEM_MAP(ROW)
    ROW(total, total_name)
#undef ROW
}
