/* SPDX-License-Identifier: Apache-2.0 */
/* handshake.c: reads the job's key, and makes and checks the proofs of handshake.h. */
#include "comm/meet/handshake.h"
#include "kernels/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <nettle/hmac.h>
#include <nettle/memops.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- the job's key --- */

static int digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Reads a key. No message contains text: it may be the key with one letter too many. */
static int parse(const char *name, const char *text, struct zr_job_key *key)
{
    size_t n = strlen(text);
    bool right = n >= 2 * ZR_JOB_KEY_MIN_BYTES && n <= 2 * ZR_JOB_KEY_MAX_BYTES && n % 2 == 0;
    for (size_t i = 0; i < n && right; i++)
        right = digit(text[i]) >= 0;
    if (!right)
        return zr_fail(ZERO_ERR_ARG,
                       "%s has %zu characters and is not a key: an even number of %d to %d hex digits is "
                       "allowed (openssl rand -hex 16 makes one)",
                       name, n, 2 * ZR_JOB_KEY_MIN_BYTES, 2 * ZR_JOB_KEY_MAX_BYTES);
    key->n_bytes = (int32_t)(n / 2);
    for (size_t i = 0; i < n / 2; i++)
        key->bytes[i] = (uint8_t)(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
    return 0;
}

static int read_open_file(int fd, const char *path, struct zr_job_key *key)
{
    struct stat st;
    char text[2 * ZR_JOB_KEY_MAX_BYTES + 3], name[320];
    size_t n = 0;
    if (fstat(fd, &st))
        return zr_fail(ZERO_ERR_SYSTEM, "ZERO_JOB_KEY_FILE: %s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return zr_fail(ZERO_ERR_ARG, "ZERO_JOB_KEY_FILE: %s is not a file", path);
    if (st.st_uid != geteuid())
        return zr_fail(ZERO_ERR_ARG,
                       "ZERO_JOB_KEY_FILE: %s belongs to user %ld: only a file of this user (%ld) is allowed",
                       path, (long)st.st_uid, (long)geteuid());
    if (st.st_mode & 0177)
        return zr_fail(ZERO_ERR_ARG,
                       "ZERO_JOB_KEY_FILE: %s has mode %04o: only its owner may read a key, so chmod 600 it",
                       path, (unsigned)(st.st_mode & 07777));
    for (ssize_t got = 1; got != 0 && n < sizeof text - 1;) {
        got = read(fd, text + n, sizeof text - 1 - n);
        if (got < 0 && errno != EINTR)
            return zr_fail(ZERO_ERR_IO, "ZERO_JOB_KEY_FILE: %s: %s", path, strerror(errno));
        n += got > 0 ? (size_t)got : 0;
    }
    while (n && (text[n - 1] == '\n' || text[n - 1] == '\r' || text[n - 1] == ' '))
        n--;
    text[n] = 0;
    snprintf(name, sizeof name, "ZERO_JOB_KEY_FILE: the text of %s", path);
    int err = parse(name, text, key);
    explicit_bzero(text, sizeof text);
    return err;
}

static int read_file(const char *path, struct zr_job_key *key)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    char shown[208], why[ZR_SYSTEM_WORDS];
    if (fd < 0)
        return zr_fail(zr_is_descriptor_limit(errno) ? ZERO_ERR_SYSTEM : ZERO_ERR_ARG,
                       "ZERO_JOB_KEY_FILE: %.200s: %s", path, zr_system_words(errno, why));
    snprintf(shown, sizeof shown, "%.200s", path);
    int err = read_open_file(fd, shown, key);
    close(fd);
    return err;
}

int zr_job_key_find(struct zr_job_key *key)
{
    const char *text = getenv("ZERO_JOB_KEY"), *path = getenv("ZERO_JOB_KEY_FILE");
    *key = (struct zr_job_key){0};
    if (text && path)
        return zr_fail(ZERO_ERR_ARG,
                       "ZERO_JOB_KEY and ZERO_JOB_KEY_FILE are both set: one of them is allowed");
    if (text)
        return parse("ZERO_JOB_KEY", text, key);
    return path ? read_file(path, key) : 0;
}

int zr_job_key_make(struct zr_job_key *key)
{
    *key = (struct zr_job_key){.n_bytes = ZR_JOB_KEY_MIN_BYTES};
    if (getrandom(key->bytes, ZR_JOB_KEY_MIN_BYTES, 0) != ZR_JOB_KEY_MIN_BYTES)
        return zr_fail(ZERO_ERR_SYSTEM, "no random bits for the job's key: %s", strerror(errno));
    return 0;
}

/* --- proofs --- */

_Static_assert(ZR_PROOF_BYTES == SHA256_DIGEST_SIZE, "a proof is an HMAC-SHA256");
_Static_assert(sizeof(struct zr_hello) == 256, "no padding");

int zr_shake_random(uint8_t *bytes, size_t n)
{
    if (getrandom(bytes, n, 0) != (ssize_t)n)
        return zr_fail(ZERO_ERR_SYSTEM, "rendezvous: no random bits: %s", strerror(errno));
    return 0;
}

static void add(struct hmac_sha256_ctx *mac, const void *bytes, size_t n)
{
    hmac_sha256_update(mac, n, bytes);
}

void zr_shake_prove(const struct zr_world *w, const struct zr_shake *s, enum zr_frame_type type, int32_t code,
                    const char *text, uint8_t proof[ZR_PROOF_BYTES])
{
    /* Every part has a fixed size except the three texts, whose sizes come first. So no two conversations
     * give the same bytes. */
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
