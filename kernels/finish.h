/* finish.h: the end of a step's agreement, as device.h defines it (struct zr_finish), on the host and on a
 * GPU. */
#ifndef ZR_KERNELS_FINISH_H
#define ZR_KERNELS_FINISH_H

#include "kernels/device.h"
#include "kernels/exact_sum.h"
#include "kernels/host_device_code.h"

/* On memory that the calling thread may touch. */
void zr_finish_step(const struct zr_finish *f);

ZR_HOST_DEVICE const struct zr_step_record *zr_finish_record(const struct zr_finish *f, int32_t rank)
{
    return (const struct zr_step_record *)((const char *)f->records + rank * f->stride_bytes);
}

ZR_HOST_DEVICE uint32_t zr_finish_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Whether a rank's words are not what this rank's are. */
ZR_HOST_DEVICE bool zr_finish_differs(const struct zr_finish *f, int32_t rank)
{
    const struct zr_step_record *own = zr_finish_record(f, f->rank), *r = zr_finish_record(f, rank);
    return r->words.serial != own->words.serial || r->words.call_hash != own->words.call_hash ||
           zr_finish_bits(r->words.lr) != zr_finish_bits(own->words.lr);
}

/* Writes the scalars and the outcome. sum: of all norms; other: the first rank that differs, -1 for none;
 * save_written: the least over ranks. */
ZR_HOST_DEVICE void zr_finish_write(const struct zr_finish *f, const struct zr_exact_sum *sum, int32_t other,
                                    int64_t save_written)
{
    const struct zr_step_record *own = zr_finish_record(f, f->rank);
    struct zr_step_outcome out;
    memset(&out, 0, sizeof out);
    out.save_written = save_written;
    out.other = other;
    if (other >= 0) {
        const struct zr_step_record *r = zr_finish_record(f, other);
        out.other_lr = r->words.lr;
        out.other_is_late = r->words.serial != own->words.serial;
        out.other_called = r->words.call_hash != own->words.call_hash;
    }
    double scale = f->scale;
    out.grad_norm = sqrt(zr_exact_value(sum)) * fabs(scale);
    bool finite = out.grad_norm - out.grad_norm == 0;
    out.skipped = !finite;
    out.clipped = finite && f->clip > 0 && out.grad_norm > (double)f->clip;
    f->scalars->grad_scale = (float)(out.clipped ? scale * ((double)f->clip / out.grad_norm) : scale);
    f->scalars->skip = !finite || other >= 0;
    *f->outcome = out;
}

#endif
