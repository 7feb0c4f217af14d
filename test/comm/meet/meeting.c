/* SPDX-License-Identifier: Apache-2.0 */
/* meeting.c: opens and closes the meetings of meeting.h, and speaks the protocol by hand. */
#include "test/comm/meet/meeting.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int meet(struct meeting *m, const struct zr_world *w, int64_t timeout_ms)
{
    uv_loop_init(&m->loop);
    return zr_rendezvous_open(&m->loop, w, timeout_ms, &m->r);
}

bool part(struct meeting *m)
{
    struct zr_sigpipe_hold hold; /* a context's loop thread does the same */
    zr_sigpipe_hold(&hold);
    if (m->r)
        zr_rendezvous_close(m->r);
    uv_run(&m->loop, UV_RUN_DEFAULT); /* returns when no handle is open */
    zr_sigpipe_release(&hold);
    zr_rendezvous_free(m->r);
    return uv_loop_close(&m->loop) == 0;
}

void open_and_note(struct rank *me)
{
    struct meeting m;
    int64_t timeout_ms = me->arg ? *(int64_t *)me->arg : LONG_MS;
    note_error(me, meet(&m, &me->w, timeout_ms));
    RANK_CHECK(me, !me->code == !!m.r, "code %d with %p", me->code, (void *)m.r);
    RANK_CHECK(me, part(&m), "handles are left");
}

int exchange_ranks(struct meeting *m)
{
    int mine = zr_rendezvous_rank(m->r), all[MAX_RANKS];
    return zr_rendezvous_exchange(m->r, &mine, sizeof mine, all);
}

bool can_meet(void)
{
    union zr_address a = loopback(0);
    int fd = zr_address_bind(&a);
    if (fd < 0)
        printf("%s is no address of this host: nothing is tested\n", meeting_host());
    else
        close(fd);
    return fd >= 0;
}

union zr_address loopback(int port)
{
    union zr_address a;
    (void)zr_address_parse(meeting_host(), port, &a);
    return a;
}

int listen_at(int port)
{
    union zr_address a = loopback(port);
    int fd = zr_address_bind(&a);
    if (fd < 0 || listen(fd, 4) == 0)
        return fd < 0 ? -1 : fd;
    close(fd);
    return -1;
}

int dial_once(int port)
{
    union zr_address a = loopback(port);
    int fd = socket(a.any.sa_family, SOCK_STREAM, 0);
    if (connect(fd, &a.any, sizeof a) == 0)
        return fd;
    close(fd);
    return -1;
}

int dial(int port)
{
    for (int i = 0; i < 15000; i++) {
        int fd = dial_once(port);
        if (fd >= 0)
            return fd;
        sleep_ms(2);
    }
    return -1;
}

bool read_frame(int fd, struct zr_frame *f, char *payload, size_t n_payload)
{
    if (recv(fd, f, sizeof *f, MSG_WAITALL) != (ssize_t)sizeof *f || f->n_bytes >= n_payload)
        return false;
    payload[f->n_bytes] = 0;
    return !f->n_bytes || recv(fd, payload, f->n_bytes, MSG_WAITALL) == (ssize_t)f->n_bytes;
}

bool read_challenge(int fd, struct zr_shake *s)
{
    struct zr_frame f;
    char nonce[ZR_NONCE_BYTES + 1];
    *s = (struct zr_shake){0};
    if (!read_frame(fd, &f, nonce, sizeof nonce) || f.type != ZR_FRAME_CHALLENGE ||
        f.n_bytes != ZR_NONCE_BYTES)
        return false;
    memcpy(s->nonce_0, nonce, sizeof s->nonce_0);
    return true;
}

struct spoken_hello hello_of(const struct zr_world *w, struct zr_shake *s, int rank, int world)
{
    struct spoken_hello h = {.frame = {.magic = ZR_FRAME_MAGIC,
                                       .version = ZR_FRAME_VERSION,
                                       .type = ZR_FRAME_HELLO,
                                       .n_bytes = sizeof h.hello,
                                       .rank = rank,
                                       .world = world,
                                       .about = w->attempt}};
    s->rank = rank;
    s->world = world;
    s->attempt = w->attempt;
    (void)zr_shake_random(s->nonce, sizeof s->nonce);
    memcpy(h.hello.nonce, s->nonce, sizeof s->nonce);
    zr_shake_prove(w, s, ZR_FRAME_HELLO, 0, "", h.hello.proof);
    return h;
}

int greet(const struct rank *me, int rank, int world)
{
    struct zr_shake s;
    int fd = dial(me->w.port);
    if (!read_challenge(fd, &s))
        return -1;
    struct spoken_hello h = hello_of(&me->w, &s, rank, world);
    return send(fd, &h, sizeof h, MSG_NOSIGNAL) == (ssize_t)sizeof h ? fd : -1;
}
