/* SPDX-License-Identifier: Apache-2.0 */
/* spread.c: numbers the hosts of a group, lists its places by host, and finds which shape the table has. */
#include "comm/spread.h"
#include "kernels/alloc.h"
#include "kernels/error.h"

#include <stdlib.h>

/* Numbers the group's hosts by their first places. host_in has (hosts of the world) these numbers, or -1. */
static void number_hosts(const struct zr_topology *t, const struct zr_group *g, int32_t *host_in,
                         struct zr_spread *s)
{
    for (int32_t h = 0; h < t->n_hosts; h++)
        host_in[h] = -1;
    for (int32_t p = 0; p < g->size; p++) {
        int32_t *host = &host_in[t->host_of[zr_group_member(g, p)]];
        if (*host < 0)
            *host = s->n_hosts++;
        s->host_of[p] = *host;
        s->local_of[p] = s->n_local[*host]++;
    }
    s->host = s->host_of[g->rank];
}

/* Lists the places host by host. */
static void list_places(struct zr_spread *s)
{
    for (int32_t h = 1; h < s->n_hosts; h++)
        s->first[h] = s->first[h - 1] + s->n_local[h - 1];
    for (int32_t p = 0; p < s->size; p++)
        s->at[s->first[s->host_of[p]] + s->local_of[p]] = p;
}

/* Finds which shape the table has (spread.h). */
static void find_shape(struct zr_spread *s)
{
    s->most_local = s->least_local = s->n_local[0];
    for (int32_t h = 1; h < s->n_hosts; h++) {
        s->most_local = s->n_local[h] > s->most_local ? s->n_local[h] : s->most_local;
        s->least_local = s->n_local[h] < s->least_local ? s->n_local[h] : s->least_local;
    }
    s->runs = true;
    for (int32_t p = 0; p < s->size; p++)
        s->runs &= s->at[p] == p; /* hosts are numbered by their first places */
    s->columns = s->runs && s->most_local == s->least_local;
    s->cut = s->columns && (s->n_hosts == 1 || (s->most_local & (s->most_local - 1)) == 0);
}

int zr_spread_make(const struct zr_topology *t, const struct zr_group *g, struct zr_spread *out)
{
    struct zr_spread s = {.size = g->size};
    *out = (struct zr_spread){.size = 0};
    ZR_TRY(ZR_ZALLOC(s.host_of, (int64_t)g->size * 5 + t->n_hosts, "the hosts of %d ranks", g->size));
    s.local_of = s.host_of + g->size;
    s.at = s.local_of + g->size;
    s.n_local = s.at + g->size;
    s.first = s.n_local + g->size;
    number_hosts(t, g, s.first + g->size, &s);
    list_places(&s);
    find_shape(&s);
    *out = s;
    return 0;
}

void zr_spread_free(struct zr_spread *s)
{
    if (!s)
        return;
    free(s->host_of); /* and the arrays behind it */
    *s = (struct zr_spread){.size = 0};
}

/* --- all groups of a role --- */

static void add_worst(const struct zr_spread *s, struct zr_spread_worst *w)
{
    int32_t remote = s->size - s->least_local;
    w->most_hosts = s->n_hosts > w->most_hosts ? s->n_hosts : w->most_hosts;
    w->most_remote = remote > w->most_remote ? remote : w->most_remote;
    w->all_cut &= s->cut;
    w->all_one_host &= s->n_hosts == 1;
}

/* Adds the group of n ranks at places first, first + step, and so on. members has room for n. */
static int add_group(const struct zr_topology *t, int32_t first, int32_t step, int32_t n, int32_t *members,
                     struct zr_spread_worst *w)
{
    struct zr_spread s;
    for (int32_t k = 0; k < n; k++)
        members[k] = t->rank_at[first + k * step];
    int err = zr_spread_make(t, &(struct zr_group){.size = n, .members = members}, &s);
    if (err)
        return err;
    add_worst(&s, w);
    zr_spread_free(&s);
    return 0;
}

int zr_spread_worst(const struct zr_topology *t, int32_t dp_shard, enum zr_role role,
                    struct zr_spread_worst *out)
{
    bool across = role == ZR_ROLE_GATHER_OUTER || role == ZR_ROLE_REDUCE_OUTER,
         is_all = role == ZR_ROLE_CONTROL;
    int32_t size = is_all ? t->world : across ? t->world / dp_shard : dp_shard, n_groups = t->world / size;
    int err = 0;
    *out = (struct zr_spread_worst){.all_cut = true, .all_one_host = true};
    int32_t *members;
    ZR_TRY(ZR_ALLOC(members, size, "a group of %d ranks", size));
    for (int32_t i = 0; i < n_groups && !err; i++)
        err = add_group(t, across ? i : i * size, across ? n_groups : 1, size, members, out);
    free(members);
    return err;
}
