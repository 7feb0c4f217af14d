/* meeting.c: see meeting.h. */
#include "test/comm/meeting.h"

#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <xxhash.h>

int meet(struct meeting *m, const struct zr_world *w, int64_t timeout_ms)
{
    uv_loop_init(&m->loop);
    return zr_rendezvous_open(&m->loop, w, timeout_ms, &m->r);
}

bool part(struct meeting *m)
{
    if (m->r)
        zr_rendezvous_close(m->r);
    uv_run(&m->loop, UV_RUN_DEFAULT); /* returns once nothing is open */
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
    int mine = zr_rendezvous_rank(m->r), all[MOST_RANKS];
    return zr_rendezvous_exchange(m->r, &mine, sizeof mine, all);
}

struct sockaddr_in loopback(int port)
{
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
}

int listen_at(int port)
{
    struct sockaddr_in a = loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 4) == 0)
        return fd;
    close(fd);
    return -1;
}

int dial(int port)
{
    struct sockaddr_in a = loopback(port);
    for (int i = 0; i < 15000; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
            return fd;
        close(fd);
        sleep_ms(2);
    }
    return -1;
}

struct zr_frame hello_of(const struct rank *me, int rank, int world)
{
    return (struct zr_frame){.magic = ZR_FRAME_MAGIC,
                             .version = ZR_FRAME_VERSION,
                             .type = ZR_FRAME_HELLO,
                             .rank = rank,
                             .world = world,
                             .job = XXH3_64bits(me->w.job, strlen(me->w.job))};
}
