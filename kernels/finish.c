/* finish.c: see finish.h. */
#include "kernels/finish.h"
#include "kernels/exact_sum.h"

#include <math.h>

static const struct zr_step_record *record_of(const struct zr_finish *f, int32_t rank)
{
    return (const struct zr_step_record *)((const char *)f->records + rank * f->stride_bytes);
}

void zr_finish_step(const struct zr_finish *f)
{
    const struct zr_step_words *own = &record_of(f, f->rank)->words;
    struct zr_step_outcome out = {.save_written = own->save_written, .serial = own->serial, .other = -1};
    struct zr_exact_sum sum;
    zr_exact_reset(&sum);
    for (int32_t r = 0; r < f->n_ranks; r++) {
        const struct zr_step_record *rec = record_of(f, r);
        const struct zr_step_words *w = &rec->words;
        zr_exact_merge(&sum, &rec->norm);
        if (w->save_written < out.save_written)
            out.save_written = w->save_written;
        bool late = w->serial != own->serial, called = w->call_hash != own->call_hash;
        if (out.other < 0 && (late || called || memcmp(&w->lr, &own->lr, sizeof w->lr))) {
            out.other = r;
            out.other_lr = w->lr;
            out.other_is_late = late;
            out.other_called = called;
        }
    }
    double scale = f->scale;
    out.grad_norm = sqrt(zr_exact_value(&sum)) * fabs(scale);
    bool finite = isfinite(out.grad_norm);
    out.skipped = !finite;
    out.clipped = finite && f->clip > 0 && out.grad_norm > (double)f->clip;
    *f->scalars = (struct zr_step_scalars){
        .grad_scale = (float)(out.clipped ? scale * ((double)f->clip / out.grad_norm) : scale),
        .skip = !finite || out.other >= 0};
    *f->outcome = out;
}
