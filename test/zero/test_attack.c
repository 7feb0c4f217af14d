/* SPDX-License-Identifier: Apache-2.0 */
/* test_attack.c: another process attacks a job while its ranks meet. It opens a thousand silent connections,
 * sends random frames, replays and reflects handshakes, takes rank 0's place, and lies as a member.
 *
 * No attacker becomes a member or learns anything. The job ends as without an attack, and memory stays small.
 * Run it under ASan to see that no byte is read that was not sent. ZERO_TEST_SEED repeats a run. */
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"
#include "test/held_port.h"
#include "test/kernels/random.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    MAX_UNIDENTIFIED = 128 /* most unidentified connections that rank 0 keeps */,
    WORLD = 3,
    ATTACKER = 3,
    SILENT = 1000,
    SPEAKING = 400,
    MAX_KIB = 64 << 10,
    STAGE = 3
};

static uint64_t seed;

/* Reads a size of this process in KiB: "VmRSS:", or "VmHWM:" for its peak. */
static long memory_kib(const char *key)
{
    char line[256];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "re");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            kib = strtol(line + strlen(key), NULL, 10);
    if (f)
        fclose(f);
    return kib;
}

/* Trains on one rank and stores the outcome. */
static void train(struct rank *me)
{
    struct toy_rank r = {.rank = me->w.rank, .world = me->w.world};
    struct toy m;
    zero_ctx *z = NULL;
    uint64_t hash = 0;
    long before = memory_kib("VmRSS:");
    snprintf(r.url, sizeof r.url, "tcp://127.0.0.1:%d", me->w.port);
    struct zero_config cfg = toy_config(&r, STAGE);
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    long grown = memory_kib("VmHWM:") - before;
    for (int step = 0; !err && step < 3; step++) {
        err = FIRST_ERROR(toy_forward(&m, z, true), toy_backward(&m, z, true, step, me->w.rank),
                          zero_step(z, 1e-2f, NULL));
    }
    if (!err)
        err = toy_hash(z, 2, &hash);
    if (!err)
        err = zero_unwrap(&z);
    RANK_CHECK(me, err == 0, "%s", zero_last_error());
    RANK_CHECK(me, grown < MAX_KIB, "%ld KiB more", grown);
    snprintf(me->note, sizeof me->note, "%016llx", (unsigned long long)hash);
    toy_free(&m);
}

/* ---- attacks from outside ---- */

/* Reads fd until it ends or is quiet for a moment. Only a challenge or an empty refusal may come, without the
 * job's name or key. */
static void listen_to(struct rank *me, int fd)
{
    struct timeval moment = {.tv_usec = 100000};
    unsigned char said[4096];
    size_t n = 0;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &moment, sizeof moment);
    for (ssize_t got = 1; got > 0 && n<sizeof said; n += got> 0 ? (size_t)got : 0)
        got = recv(fd, said + n, sizeof said - n, 0);
    for (size_t at = 0; at + sizeof(struct zr_frame) <= n;) {
        struct zr_frame f;
        memcpy(&f, said + at, sizeof f);
        bool known = (f.type == ZR_FRAME_CHALLENGE && f.n_bytes == ZR_NONCE_BYTES) ||
                     (f.type == ZR_FRAME_REFUSE && f.n_bytes == 0);
        RANK_CHECK(me, known, "an unidentified connection was sent %u bytes by a frame of type %u", f.n_bytes,
                   f.type);
        at += sizeof f + f.n_bytes;
    }
    RANK_CHECK(me, n <= 2 * sizeof(struct zr_frame) + ZR_NONCE_BYTES, "%zu bytes were said", n);
    RANK_CHECK(me, !memmem(said, n, me->w.job, strlen(me->w.job)), "the job's name was told");
    RANK_CHECK(me, !memmem(said, n, me->w.key.bytes, (size_t)me->w.key.n_bytes), "the key was told");
}

static void send_all(int fd, const void *bytes, size_t n)
{
    (void)!send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void fill_random(uint64_t *s, void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ((unsigned char *)bytes)[i] = (unsigned char)random_next(s);
}

/* Attacks with one of many frames. captured: a proof that was right for another nonce. */
static void speak(struct rank *me, uint64_t *s, int how, const struct spoken_hello *captured)
{
    struct zr_world w = me->w;
    struct zr_shake shake;
    unsigned char bytes[4000];
    struct {
        struct zr_frame frame;
        char payload[2048];
    } f = {.frame = {.magic = ZR_FRAME_MAGIC, .version = ZR_FRAME_VERSION, .world = WORLD}};
    int fd = dial_once(w.port);
    if (fd < 0)
        return;
    if (!read_challenge(fd, &shake)) { /* too many connections */
        close(fd);
        return;
    }
    int rank = 1 + how / 8 % (WORLD - 1);
    f.frame.rank = rank;
    memset(f.payload, 'x', sizeof f.payload);
    fill_random(s, w.key.bytes, sizeof w.key.bytes); /* it does not know the key */
    struct spoken_hello h = hello_of(&w, &shake, rank, WORLD);
    switch (how % 8) {
    case 0: /* random bytes */
        fill_random(s, bytes, sizeof bytes);
        send_all(fd, bytes, (size_t)random_in(s, 1, sizeof bytes));
        break;
    case 1: /* half a frame */
        send_all(fd, &h, (size_t)random_in(s, 1, sizeof h - 1));
        break;
    case 2: /* a huge size */
        h.frame.n_bytes = (uint32_t)random_in(s, 2049, UINT32_MAX);
        send_all(fd, &h, sizeof h);
        break;
    case 3: /* another key, or none, or no proof */
        if (how & 8)
            w.key.n_bytes = 0, h = hello_of(&w, &shake, rank, WORLD);
        if (how & 16)
            memset(&h.hello, 0, sizeof h.hello);
        send_all(fd, &h, sizeof h);
        break;
    case 4: /* a captured hello, replayed as it was and with the current nonce */
        send_all(fd, captured, sizeof *captured);
        break;
    case 5: /* rank 0's own nonce, sent back */
        memcpy(h.hello.nonce, shake.nonce_0, sizeof shake.nonce_0);
        memcpy(h.hello.proof, shake.nonce_0, sizeof h.hello.proof);
        send_all(fd, &h, sizeof h);
        break;
    case 6: /* any frame that a member may send, with text that is not terminated */
        f.frame.type = (uint16_t)random_in(s, 0, 20);
        f.frame.about = (int32_t)random_in(s, -12, WORLD);
        f.frame.n_bytes = (uint32_t)random_in(s, 0, sizeof f.payload);
        send_all(fd, &f, sizeof f.frame + f.frame.n_bytes);
        break;
    default: /* a hello, then more at once */
        send_all(fd, &h, sizeof h);
        f.frame.type = ZR_FRAME_GOODBYE;
        send_all(fd, &f, sizeof f.frame);
    }
    listen_to(me, fd);
    close(fd);
}

/* Connects before ranks 1 and 2, and stays until they are done. */
static void attack(struct rank *me)
{
    uint64_t s = seed;
    int fds[SILENT], n = 0;
    struct rlimit files = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    struct zr_shake other = {.nonce_0 = "heard at another time"};
    struct spoken_hello captured = hello_of(&me->w, &other, 1, WORLD);
    for (int fd; n < SILENT && (rlim_t)n + 100 < files.rlim_cur && (fd = dial(me->w.port)) >= 0;)
        fds[n++] = fd;
    RANK_CHECK(me, n > MAX_UNIDENTIFIED, "only %d unidentified connections", n);
    for (int i = 0; i < SPEAKING / 10 && !me->wrong[0]; i++)
        speak(me, &s, i, &captured);
    atomic_store(&me->stage, 1);
    for (int i = 0; i < SPEAKING && !me->wrong[0]; i++) {
        if (atomic_load(&me->all[1].stage) && atomic_load(&me->all[2].stage))
            break;
        speak(me, &s, (int)random_in(&s, 0, 127), &captured);
    }
    RANK_CHECK(me, wait_stage(&me->all[0], 1), "rank 0 did not end");
    for (int i = 0; i < n && !me->wrong[0]; i++)
        listen_to(me, fds[i]);
    for (int i = 0; i < n; i++)
        close(fds[i]);
}

static void under_attack(struct rank *me)
{
    if (me == &me->all[ATTACKER]) {
        attack(me);
        return;
    }
    if (me->w.rank > 0)
        RANK_CHECK(me, wait_stage(&me->all[ATTACKER], 1), "the attack did not begin");
    train(me);
    atomic_store(&me->stage, 1);
}

static void world_of_three(struct rank *r)
{
    r->w.world = WORLD;
}

static void expect_peace(struct rank *r, const char *hash)
{
    for (int i = 0; i < WORLD; i++)
        assert_string_equal(r[i].note, hash);
}

static char peaceful[32]; /* how the job ends without an attack */

static void test_unidentified_connections(void **state)
{
    expect_peace(run_ranks(true, WORLD + 1, under_attack, NULL, world_of_three), peaceful);
}

/* ---- attacks from rank 0's place ---- */

/* Listens at the address before rank 0 does, and gives each rank another wrong answer. Returns the last hello
 * that a rank sent. */
static struct spoken_hello deceive(struct rank *me, int server, uint64_t *s)
{
    struct spoken_hello heard = {0};
    for (int how = 0; how < 10; how++) {
        struct {
            struct zr_frame frame;
            char payload[3000];
        } f = {.frame = {.magic = ZR_FRAME_MAGIC,
                         .version = ZR_FRAME_VERSION,
                         .type = ZR_FRAME_CHALLENGE,
                         .n_bytes = ZR_NONCE_BYTES,
                         .world = WORLD}};
        int fd = accept(server, NULL, NULL);
        fill_random(s, f.payload, sizeof f.payload);
        send_all(fd, &f, sizeof f.frame + ZR_NONCE_BYTES);
        if (recv(fd, &heard, sizeof heard, MSG_WAITALL) != (ssize_t)sizeof heard) {
            rank_says(me, __FILE__, __LINE__, "heard", "a rank did not answer");
            close(fd);
            break;
        }
        static const uint16_t types[] = {ZR_FRAME_ACCEPT, ZR_FRAME_READY,   ZR_FRAME_FAIL, ZR_FRAME_LOST,
                                         ZR_FRAME_ALL,    ZR_FRAME_GOODBYE, ZR_FRAME_EXIT, ZR_FRAME_REFUSE};
        f.frame.type = types[how % 8];
        f.frame.about = how == 3 ? 2 : -5;
        f.frame.n_bytes = how == 4 ? 1u << 30 : how == 8 ? ZR_PROOF_BYTES : (uint32_t)random_in(s, 0, 2048);
        if (how == 8) /* the rank's own proof, reflected */
            memcpy(f.payload, heard.hello.proof, ZR_PROOF_BYTES);
        send_all(fd, &f, sizeof f.frame + (f.frame.n_bytes < 3000 ? f.frame.n_bytes : 3000));
        char rest[64];
        while (recv(fd, rest, sizeof rest, 0) > 0)
            ;
        close(fd);
    }
    close(server);
    return heard;
}

static void deceived(struct rank *me)
{
    uint64_t s = seed;
    if (me == &me->all[ATTACKER]) {
        int server = listen_at(me->w.port);
        RANK_CHECK(me, server >= 0, "the place is taken");
        atomic_store(&me->stage, 1);
        struct spoken_hello captured = deceive(me, server, &s);
        atomic_store(&me->stage, 2);
        /* A proof that a rank gave the impostor is useless with rank 0. */
        for (int i = 0; i < 20 && !me->wrong[0] && !atomic_load(&me->all[0].stage); i++) {
            int fd = i ? dial_once(me->w.port) : dial(me->w.port);
            if (fd < 0)
                break;
            send_all(fd, &captured, sizeof captured);
            listen_to(me, fd);
            close(fd);
        }
        return;
    }
    RANK_CHECK(me, wait_stage(&me->all[ATTACKER], me->w.rank ? 1 : 2), "the attack did not begin");
    train(me);
    atomic_store(&me->stage, 1);
}

static void test_impostor(void **state)
{
    expect_peace(run_ranks(true, WORLD + 1, deceived, NULL, world_of_three), peaceful);
}

/* ---- attacks by a member ---- */

/* Has the key, and then sends nonsense. Rank 0 fails and names this rank. */
static void liar(struct rank *me)
{
    uint64_t s = seed + *(uint64_t *)me->arg;
    if (me->w.rank == 0) {
        struct meeting m;
        note_error(me, meet(&m, &me->w, LONG_MS));
        if (!me->code)
            note_error(me, exchange_ranks(&m));
        RANK_CHECK(me, part(&m), "handles are left");
        return;
    }
    struct {
        struct zr_frame frame;
        char payload[70000];
    } f;
    char proof[64];
    int fd = greet(me, 1, 2);
    RANK_CHECK(me, read_frame(fd, &f.frame, proof, sizeof proof) && f.frame.type == ZR_FRAME_ACCEPT,
               "it was not let in");
    for (int i = 0; i < 4; i++) {
        f.frame = (struct zr_frame){.magic = ZR_FRAME_MAGIC,
                                    .version = ZR_FRAME_VERSION,
                                    .type = (uint16_t)random_in(&s, 0, 12),
                                    .n_bytes = (uint32_t)random_in(&s, 0, sizeof f.payload),
                                    .rank = random_in(&s, 0, 3) ? 1 : (int32_t)random_next(&s),
                                    .world = random_in(&s, 0, 3) ? 2 : (int32_t)random_next(&s),
                                    .about = (int32_t)random_in(&s, -12, 3)};
        memset(f.payload, 'x', sizeof f.payload);
        size_t n = sizeof f.frame + f.frame.n_bytes;
        if (random_in(&s, 0, 5) == 0)
            f.frame.n_bytes = (uint32_t)random_next(&s);
        if (random_in(&s, 0, 5) == 0)
            n = (size_t)random_in(&s, 1, (int64_t)n);
        send_all(fd, &f, n);
    }
    close(fd);
}

static void test_liar(void **state)
{
    for (uint64_t i = 0; i < 60; i++) {
        struct rank *r = run_ranks(true, 2, liar, &i, NULL);
        if (!r[0].code || !(strstr(r[0].note, "rank 1") || strstr(r[0].note, "xxxx")))
            fail_msg("round %d: code %d \"%.300s\"", (int)i, r[0].code, r[0].note);
    }
}

/* Sends a frame of rank 1 with an n-byte payload. */
static void give(int fd, enum zr_frame_type type, int32_t about, const void *payload, size_t n)
{
    const struct zr_frame head = {.magic = ZR_FRAME_MAGIC,
                                  .version = ZR_FRAME_VERSION,
                                  .type = (uint16_t)type,
                                  .n_bytes = (uint32_t)n,
                                  .rank = 1,
                                  .world = 2,
                                  .about = about};
    send_all(fd, &head, sizeof head);
    send_all(fd, payload, n);
}

/* Rank 1 gives a record of its configuration with an unknown error code, and then a message whose text is not
 * terminated. */
static void endless(struct rank *me)
{
    size_t n = *(size_t *)me->arg;
    if (me->w.rank == 0) {
        struct toy_rank r = {.rank = 0, .world = 2};
        struct toy m;
        zero_ctx *z = NULL;
        snprintf(r.url, sizeof r.url, "tcp://127.0.0.1:%d", me->w.port);
        struct zero_config cfg = toy_config(&r, STAGE);
        toy_make(&m);
        note_error(me, zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
        toy_free(&m);
        return;
    }
    struct zr_frame f;
    char answer[9000];
    struct {
        int32_t rank;
        char text[ZR_ERROR_BYTES];
    } said = {.rank = 1};
    char *mine = malloc(n);
    int fd = greet(me, 1, 2);
    RANK_CHECK(me, read_frame(fd, &f, answer, sizeof answer) && f.type == ZR_FRAME_ACCEPT,
               "it was not let in");
    memset(mine, 'x', n);
    memset(said.text, 'x', sizeof said.text);
    give(fd, ZR_FRAME_GIVE, 0, mine, n);
    while (read_frame(fd, &f, answer, sizeof answer)) /* until rank 0 has failed and closes the connection */
        if (f.type == ZR_FRAME_ALL)
            give(fd, ZR_FRAME_RESULT, -99, &said, sizeof said);
    close(fd);
    free(mine);
}

static void test_endless_text(void **state)
{
    size_t n = 1;
    struct rank *r = run_ranks(true, 2, endless, &n, NULL);
    const char *at = strstr(r[0].note, "rank 0 gives ");
    if (!at)
        fail_msg("code %d \"%.300s\"", r[0].code, r[0].note);
    n = strtoul(at + strlen("rank 0 gives "), NULL, 10); /* size of a rank's record */
    assert_true(n > 100);
    r = run_ranks(true, 2, endless, &n, NULL);
    expect_rank(&r[0], ZERO_ERR_FAILED, "rank 1: xxxx");
}

int main(void)
{
    char job[32];
    seed = fresh_seed("attack");
    snprintf(job, sizeof job, "test %d", (int)getpid()); /* the job's name in ranks.c */
    setenv("ZERO_JOB", job, 1);
    setenv("ZERO_JOB_KEY", "61206b6579206f662031362062797465", 1);
    struct rank *r = run_ranks(true, WORLD, train, NULL, NULL);
    snprintf(peaceful, sizeof peaceful, "%.31s", r[0].note);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unidentified_connections),
        cmocka_unit_test(test_impostor),
        cmocka_unit_test(test_liar),
        cmocka_unit_test(test_endless_text),
    };
    return cmocka_run_group_tests_name("attack", tests, NULL, NULL);
}
