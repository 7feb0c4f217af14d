/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_parts.c: all-to-all and shift over NCCL, in arenas or of arrays. The parts that ranks send each other
 * are messages in one group of calls. A rank's own part is copied. */
#include "comm/nccl/nccl_comm.h"

/* The parts of one operation. At each distance from first to end - 1, this rank sends a part to the place
 * that far ahead, and receives one from the place that far behind. */
struct parts {
    const char *src;
    char *dst;
    int first, end;
    /* Bytes of a part; bytes from the part of one place to that of the next in src, and in dst. */
    int64_t bytes, src_stride, dst_stride;
};

static struct parts parts_of(const struct zr_nccl *m, const struct zr_comm_op *op)
{
    const struct zr_arrays *a = &op->arrays;
    const int size = m->base.group.size, distance = ((a->src ? a->by : op->by) % size + size) % size;
    const bool all = op->post.op == ZR_OP_ALL_TO_ALL;
    const int64_t bytes = op->post.bytes, stride = a->src ? a->stride * zr_dtype_bytes(a->dtype) : bytes;
    return (struct parts){.src = a->src ? a->src : m->base.arena + op->off,
                          .dst = a->src ? a->dst : m->base.arena + op->to,
                          .first = all ? 0 : distance,
                          .end = all ? size : distance + 1,
                          .bytes = bytes,
                          .src_stride = all ? stride : 0,
                          .dst_stride = all ? bytes : 0};
}

static ncclResult_t pass_at(const struct zr_nccl *m, cudaStream_t native, const struct parts *p, int distance)
{
    const struct zr_nccl_api *api = &m->set->api;
    const int to = zr_shift_from(&m->base.group, -distance), from = zr_shift_from(&m->base.group, distance);
    const size_t bytes = (size_t)p->bytes;
    ncclResult_t res = api->Send(p->src + to * p->src_stride, bytes, ncclInt8, to, m->comm, native);
    return res ? res : api->Recv(p->dst + from * p->dst_stride, bytes, ncclInt8, from, m->comm, native);
}

static ncclResult_t pass_all(const struct zr_nccl *m, cudaStream_t native, const struct parts *p)
{
    ncclResult_t res = m->set->api.GroupStart();
    if (res)
        return res;
    for (int k = p->first > 1 ? p->first : 1; k < p->end && !res; k++)
        res = pass_at(m, native, p, k);
    ncclResult_t ended = m->set->api.GroupEnd();
    return res ? res : ended;
}

int zr_nccl_pass(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op, ncclResult_t *res)
{
    const struct zr_device_ops *d = m->set->dev->ops;
    const struct parts p = parts_of(m, op);
    const int64_t me = m->base.group.rank;
    int err = 0;
    if (p.bytes == 0)
        return 0;
    if (p.first == 0)
        err = d->copy(s, p.dst + me * p.dst_stride, p.src + me * p.src_stride, p.bytes);
    if (!err && p.end > 1)
        *res = pass_all(m, d->stream_native(s), &p);
    return err;
}
