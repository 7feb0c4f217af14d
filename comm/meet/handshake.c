/* SPDX-License-Identifier: Apache-2.0 */
/* handshake.c: see handshake.h. */
#include "comm/meet/handshake.h"

#include <errno.h>
#include <nettle/hmac.h>
#include <nettle/memops.h>
#include <string.h>
#include <sys/random.h>

_Static_assert(ZR_PROOF_BYTES == SHA256_DIGEST_SIZE, "a proof is an HMAC-SHA256");
_Static_assert(sizeof(struct zr_hello) == 256, "no padding");

int zr_shake_random(uint8_t *bytes, size_t n)
{
    if (getrandom(bytes, n, 0) != (ssize_t)n)
        return zr_fail(ZR_ERR_SYSTEM, "rendezvous: no random bits: %s", strerror(errno));
    return 0;
}

static void add(struct hmac_sha256_ctx *mac, const void *bytes, size_t n)
{
    hmac_sha256_update(mac, n, bytes);
}

void zr_shake_prove(const struct zr_world *w, const struct zr_shake *s, enum zr_frame_type type, int32_t code,
                    const char *text, uint8_t proof[ZR_PROOF_BYTES])
{
    /* Every part has a fixed size but the three texts, whose sizes come first: no two conversations give the
     * same bytes. */
    const int32_t numbers[] = {ZR_FRAME_VERSION,
                               (int32_t)type,
                               s->rank,
                               s->world,
                               s->attempt,
                               code,
                               (int32_t)strlen(w->job),
                               (int32_t)strlen(text),
                               (int32_t)strlen(s->name)};
    struct hmac_sha256_ctx mac;
    hmac_sha256_set_key(&mac, (size_t)w->key.n_bytes, w->key.bytes);
    add(&mac, type == ZR_FRAME_HELLO ? "libzero: rank to 0" : "libzero: 0 to rank", 18);
    add(&mac, numbers, sizeof numbers);
    add(&mac, s->nonce_0, sizeof s->nonce_0);
    add(&mac, s->nonce, sizeof s->nonce);
    add(&mac, w->job, strlen(w->job));
    add(&mac, text, strlen(text));
    add(&mac, s->name, strlen(s->name));
    add(&mac, &s->start, sizeof s->start);
    hmac_sha256_digest(&mac, ZR_PROOF_BYTES, proof);
    explicit_bzero(&mac, sizeof mac);
}

void zr_shake_mark(const struct zr_world *w, char mark[33])
{
    static const char digits[] = "0123456789abcdef";
    uint8_t digest[16];
    struct hmac_sha256_ctx mac;
    hmac_sha256_set_key(&mac, (size_t)w->key.n_bytes, w->key.bytes);
    add(&mac, "libzero: a job's mark", 21);
    add(&mac, w->job, strlen(w->job));
    hmac_sha256_digest(&mac, sizeof digest, digest);
    explicit_bzero(&mac, sizeof mac);
    for (int i = 0; i < 16; i++) {
        mark[2 * i] = digits[digest[i] >> 4];
        mark[2 * i + 1] = digits[digest[i] & 15];
    }
    mark[32] = 0;
}

static bool proves(const struct zr_world *w, const struct zr_shake *s, enum zr_frame_type type, int32_t code,
                   const char *text, const void *proof)
{
    uint8_t want[ZR_PROOF_BYTES];
    zr_shake_prove(w, s, type, code, text, want);
    return memeql_sec(want, proof, sizeof want);
}

bool zr_shake_hello(const struct zr_world *w, struct zr_shake *s, const struct zr_frame *f,
                    const char *payload)
{
    struct zr_hello hello;
    if (f->type != ZR_FRAME_HELLO || f->version != ZR_FRAME_VERSION || f->n_bytes != sizeof hello)
        return false;
    memcpy(&hello, payload, sizeof hello);
    memcpy(s->nonce, hello.nonce, sizeof s->nonce);
    memcpy(s->name, hello.name, sizeof s->name);
    s->name[ZR_NAME_CHARS] = 0;
    s->start = hello.start;
    s->start.job[sizeof s->start.job - 1] = 0;
    s->rank = f->rank;
    s->world = f->world;
    s->attempt = f->about;
    return proves(w, s, ZR_FRAME_HELLO, 0, "", hello.proof);
}

bool zr_shake_answer(const struct zr_world *w, const struct zr_shake *s, const struct zr_frame *f,
                     const char *payload, const char **text)
{
    *text = "";
    if (f->version != ZR_FRAME_VERSION || f->n_bytes < ZR_PROOF_BYTES)
        return false;
    if (f->type == ZR_FRAME_ACCEPT)
        return f->n_bytes == ZR_PROOF_BYTES && proves(w, s, ZR_FRAME_ACCEPT, 0, "", payload);
    if (f->type != ZR_FRAME_REFUSE && f->type != ZR_FRAME_AGAIN)
        return false;
    *text = payload + ZR_PROOF_BYTES;
    return proves(w, s, (enum zr_frame_type)f->type, f->about, *text, payload);
}
