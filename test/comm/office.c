/* office.c: see office.h. */
#include "test/comm/office.h"

#include <string.h>

int office_open(struct office *o, const struct zr_world *w, bool self, int n, int64_t timeout_ms,
                int64_t arena_bytes)
{
    static const char *names[MOST_COMMS] = {"gather", "reduce"};
    memset(o, 0, sizeof *o);
    uv_loop_init(&o->loop);
    int err = zr_rendezvous_open(&o->loop, w, 30000, &o->rdv);
    if (!err)
        err = zr_host_device_open(&o->dev);
    for (int i = 0; i < n && !err; i++) {
        o->n = i + 1;
        err = self ? zr_self_open(o->dev, &o->comm[i])
                   : zr_shm_open(o->rdv, o->dev, names[i], timeout_ms, &o->comm[i]);
        if (!err)
            err = o->dev->ops->stream_open(o->dev, ZR_STREAM_QUEUE, names[i], NULL, &o->stream[i]);
        if (!err && arena_bytes)
            err = o->comm[i]->ops->arena(o->comm[i], arena_bytes, (void **)&o->base[i]);
    }
    return err;
}

bool office_close(struct office *o)
{
    for (int i = 0; i < o->n; i++) {
        o->dev->ops->stream_close(o->stream[i]);
        if (o->comm[i])
            o->comm[i]->ops->close(o->comm[i]);
    }
    if (o->dev)
        o->dev->ops->close(o->dev);
    zr_rendezvous_free(o->rdv);
    return uv_loop_close(&o->loop) == 0;
}
