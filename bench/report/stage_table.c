/* SPDX-License-Identifier: Apache-2.0 */
/* stage_table.c: prints tables with a column for each stage. */
#include "bench/report/stage_table.h"
#include "bench/report/report.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

void column_name(int column, char text[STAGE_TABLE_NAME])
{
    int hybrid = hybrid_of_column(column);
    if (hybrid)
        snprintf(text, STAGE_TABLE_NAME, "%s", hybrid == HYBRID_HSDP ? "HSDP" : "HFSDP");
    else
        snprintf(text, STAGE_TABLE_NAME, "stage %d", stage_of_column(column));
}

void stage_table_titles(const char *title, const char (*names)[STAGE_TABLE_NAME], int n)
{
    printf("%-22s", title);
    for (int s = 0; s < n; s++)
        printf(" %10s", names[s]);
    putchar('\n');
}

void stage_table_head(const char *title, int n)
{
    char names[N_COLUMNS][STAGE_TABLE_NAME];
    for (int s = 0; s < n; s++)
        column_name(s, names[s]);
    stage_table_titles(title, names, n);
}

void stage_table_bytes(const char *name, const int64_t *bytes, int n)
{
    printf("%-22s", name);
    for (int s = 0; s < n; s++)
        printf(" %10s", bytes[s] < 0 ? "" : report_bytes(bytes[s]).text);
    putchar('\n');
}

void stage_table_counts(const char *name, const int64_t *count, int n)
{
    printf("%-22s", name);
    for (int s = 0; s < n; s++)
        printf(" %10lld", (long long)count[s]);
    putchar('\n');
}

void stage_table_numbers(const char *name, const double *number, int n_decimals, int n)
{
    printf("%-22s", name);
    for (int s = 0; s < n; s++) {
        char text[64];
        snprintf(text, sizeof text, "%.*f", n_decimals, number[s]);
        bool is_zero = !text[strspn(text, "-0.")];
        printf(" %10s", text + (is_zero && *text == '-'));
    }
    putchar('\n');
}

void stage_table_ms(const char *name, const int64_t *ns, int n)
{
    printf("%-22s", name);
    for (int s = 0; s < n; s++)
        printf(" %7.2f ms", (double)ns[s] / 1e6);
    putchar('\n');
}

void stage_table_memory(const struct zero_bytes *bytes, const char *total_name, int n)
{
    int64_t row[N_COLUMNS], any;
#define ROW(field, text)                                                                                     \
    any = 0;                                                                                                 \
    for (int s = 0; s < n; s++) {                                                                            \
        row[s] = bytes[s].field;                                                                             \
        any |= row[s];                                                                                       \
    }                                                                                                        \
    if (any)                                                                                                 \
        stage_table_bytes(text, row, n);
    ZERO_MEM_MAP(ROW)
    ROW(total, total_name)
#undef ROW
}
