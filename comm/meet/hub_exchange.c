/* SPDX-License-Identifier: Apache-2.0 */
/* hub_exchange.c: ranks exchange small blobs, and agree on how something went (rendezvous.h). Every rank
 * sends rank 0 its own, and rank 0 sends all of them the result. */
#include "comm/meet/hub.h"
#include "comm/verdict.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_EXCHANGE_BYTES = 1 << 30 };

/* --- exchanging --- */

static bool has_not_given(const struct zr_rendezvous *r, int rank)
{
    return !r->members[rank].gave;
}

static bool say_who_has_not_given(const struct zr_rendezvous *r, int64_t ms, char text[ZR_WAIT_CHARS])
{
    if (r->w.rank == 0) {
        char who[256];
        int n = zr_hub_list_ranks(r, has_not_given, who, sizeof who);
        snprintf(text, ZR_WAIT_CHARS, "exchange: %d of %d ranks did not come in %lld ms%s: %s", n, r->w.world,
                 (long long)ms, zr_hub_limit(r, ms), who);
        return n > 0;
    }
    snprintf(text, ZR_WAIT_CHARS, "exchange: rank %d waited %lld ms%s for rank 0", r->w.rank, (long long)ms,
             zr_hub_limit(r, ms));
    return false;
}

static bool all_given(const struct zr_rendezvous *r)
{
    for (int i = 1; i < r->w.world; i++)
        if (!r->members[i].gave)
            return false;
    return true;
}

static bool has_all(const struct zr_rendezvous *r)
{
    return r->all != NULL;
}

static bool all_sent(const struct zr_rendezvous *r)
{
    for (int i = 1; i < r->w.world; i++)
        if (r->members[i].state == ZR_MEMBER_HERE && r->members[i].link &&
            uv_stream_get_write_queue_size((const uv_stream_t *)&r->members[i].link->tcp) > 0)
            return false;
    return true;
}

static bool say_who_does_not_take(const struct zr_rendezvous *r, int64_t ms, char text[ZR_WAIT_CHARS])
{
    snprintf(text, ZR_WAIT_CHARS, "exchange: a rank did not take the result in %lld ms%s", (long long)ms,
             zr_hub_limit(r, ms));
    return true;
}

/* Rank 0 has what the others sent. It is then ready for the next: a fast rank may send what is of the next
 * exchange while a slow one still reads. */
static int gather(struct zr_rendezvous *r)
{
    int err = r->code ? r->code : zr_hub_run_from(r, r->exchange_ms, all_given, say_who_has_not_given);
    for (int i = 1; i < r->w.world && !err; i++) {
        const struct zr_member *member = &r->members[i];
        if (member->gave != r->exchange_of ||
            (member->gave == ZR_FRAME_GIVE && member->n_given != zr_hub_expected(r, i)))
            err = zr_hub_differ(r, i, member->gave, member->n_given);
    }
    zr_hub_expect(r, r->exchange_of, 0);
    return err;
}

/* What rank 0 has made of it. */
static int await_result(struct zr_rendezvous *r)
{
    int err = zr_hub_run_from(r, r->exchange_ms, has_all, say_who_has_not_given);
    zr_hub_expect(r, r->exchange_of, 0);
    return err;
}

static void forget_given(struct zr_member *member)
{
    free(member->given);
    member->given = NULL;
    member->gave = 0;
}

/* The loop may not be run again for a while, so what does not fit into the sockets' buffers is written now. A
 * rank that has the result may leave meanwhile, which is no failure of this exchange. */
static int send_to_the_end(struct zr_rendezvous *r)
{
    r->phase = ZR_PHASE_IDLE;
    return all_sent(r) ? 0 : zr_hub_run_until(r, all_sent, say_who_does_not_take);
}

static void forget_result(struct zr_rendezvous *r)
{
    free(r->all);
    r->all = NULL;
    r->n_all = 0;
}

static int exchange_as_first(struct zr_rendezvous *r, const void *mine, size_t n, char *all)
{
    zr_hub_expect(r, ZR_FRAME_GIVE, n);
    int err = gather(r);
    for (int i = 0; i < r->w.world; i++) {
        if (!err)
            memcpy(all + (size_t)i * n, i ? r->members[i].given : mine, n);
        forget_given(&r->members[i]);
    }
    int sent = err ? 0 : zr_hub_send_all(r, ZR_FRAME_ALL, 0, all, n * (size_t)r->w.world);
    if (sent)
        err = zr_hub_fail_all(r, sent, zr_error_text());
    if (!err)
        err = send_to_the_end(r);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

static int exchange_as_other(struct zr_rendezvous *r, const void *mine, size_t n, char *all)
{
    zr_hub_expect(r, ZR_FRAME_GIVE, n);
    (void)zr_hub_send(r, 0, ZR_FRAME_GIVE, mine, n);
    int err = await_result(r);
    if (!err && r->n_all != n * (size_t)r->w.world)
        err = zr_hub_fail(r, ZR_ERR_MISMATCH,
                          "exchange: rank 0 returns %zu bytes for %d ranks, rank %d gives %zu each", r->n_all,
                          r->w.world, r->w.rank, n);
    if (!err)
        memcpy(all, r->all, r->n_all);
    forget_result(r);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

/* An exchange may begin. */
static int begin_exchange(struct zr_rendezvous *r)
{
    if (r->detached || r->closing)
        return zr_fail(ZR_ERR_ORDER, "exchange: the rendezvous is %s", r->closing ? "closed" : "detached");
    if (r->w.world > 1 && (r->code || zr_hub_check(r)))
        return zr_fail(r->code, "%s", r->text);
    if (r->w.world == 1)
        return 0;
    r->phase = ZR_PHASE_EXCHANGE;
    r->exchange_ms = zr_hub_now_ms(r);
    return 0;
}

int zr_rendezvous_exchange(struct zr_rendezvous *r, const void *mine, size_t n, void *all)
{
    if (n == 0 || n > MOST_EXCHANGE_BYTES / (size_t)r->w.world)
        return zr_fail(ZR_ERR_ARG,
                       "exchange: %zu bytes from each of %d ranks: 1 to %d bytes in all are allowed", n,
                       r->w.world, MOST_EXCHANGE_BYTES);
    int err = begin_exchange(r);
    if (err)
        return err;
    if (r->w.world == 1)
        memcpy(all, mine, n);
    else
        err = r->w.rank == 0 ? exchange_as_first(r, mine, n, all) : exchange_as_other(r, mine, n, all);
    r->phase = ZR_PHASE_IDLE;
    return err;
}

/* --- how it went --- */

/* Who speaks, and what it says: what a VERDICT carries, up to the end of the text. */
struct said {
    int32_t rank;
    char text[ZR_ERROR_BYTES];
};

static size_t said_bytes(const struct said *s)
{
    return offsetof(struct said, text) + strlen(s->text);
}

/* Of what another rank sent. */
static int32_t read_verdict(const char *payload, size_t n, int32_t code, struct said *s)
{
    memset(s, 0, sizeof *s);
    memcpy(s, payload, n < sizeof *s ? n : sizeof *s - 1);
    return zr_verdict_code(code);
}

/* The lowest rank that failed speaks. */
static int gather_verdicts(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    struct said other = {.rank = -1};
    int err = gather(r);
    for (int i = 1; i < r->w.world; i++) {
        struct zr_member *member = &r->members[i];
        int32_t its = err ? 0 : read_verdict(member->given, member->n_given, member->given_about, &other);
        if (zr_verdict_rather(*code, its)) {
            *code = its;
            *s = other;
        }
        forget_given(member);
    }
    return err;
}

static int agree_as_first(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    zr_hub_expect(r, ZR_FRAME_VERDICT, sizeof *s);
    int err = gather_verdicts(r, code, s);
    int sent = err ? 0 : zr_hub_send_all(r, ZR_FRAME_VERDICT, *code, s, said_bytes(s));
    if (sent)
        err = zr_hub_fail_all(r, sent, zr_error_text());
    return err ? err : send_to_the_end(r);
}

static int agree_as_other(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    zr_hub_expect(r, ZR_FRAME_VERDICT, sizeof *s);
    int err = zr_hub_send_about(r, 0, ZR_FRAME_VERDICT, *code, s, said_bytes(s));
    if (err)
        err = zr_hub_fail_all(r, err, zr_error_text());
    if (!err)
        err = await_result(r);
    if (!err)
        *code = read_verdict(r->all, r->n_all, r->all_about, s);
    forget_result(r);
    return err;
}

static int take_verdict(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    int err = r->w.rank == 0 ? agree_as_first(r, code, s) : agree_as_other(r, code, s);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

int zr_rendezvous_agree(struct zr_rendezvous *r, int err)
{
    struct zr_kept own;
    struct said s = {.rank = r->w.rank};
    int32_t code = zr_keep(&own, err);
    if (err)
        memcpy(s.text, own.text, sizeof s.text);
    int met = begin_exchange(r);
    if (!met && r->w.world > 1)
        met = take_verdict(r, &code, &s);
    r->phase = ZR_PHASE_IDLE;
    if (err && (met || s.rank == r->w.rank))
        return zr_say_again(&own);
    if (met)
        return met;
    return code ? zr_fail(code, "rank %d: %s", s.rank, s.text) : 0;
}
