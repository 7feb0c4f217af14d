/* finish.c: the end of a step's agreement, rank after rank. */
#include "kernels/finish.h"

void zr_finish_step(const struct zr_finish *f)
{
    struct zr_exact_sum sum;
    int32_t other = -1;
    int64_t save_written = zr_finish_record(f, f->rank)->words.save_written;
    zr_exact_reset(&sum);
    for (int32_t r = 0; r < f->n_ranks; r++) {
        const struct zr_step_record *rec = zr_finish_record(f, r);
        zr_exact_merge(&sum, &rec->norm);
        if (rec->words.save_written < save_written)
            save_written = rec->words.save_written;
        if (other < 0 && zr_finish_differs(f, r))
            other = r;
    }
    zr_finish_write(f, &sum, other, save_written);
}
