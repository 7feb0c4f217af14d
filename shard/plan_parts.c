/* SPDX-License-Identifier: Apache-2.0 */
/* plan_parts.c: cuts masters and states into parts for the file that holds them (states = file). A part is
 * the unit of reading and writing: masters and states of some elements of a flat. */
#include "shard/plan.h"

/* Elements of a part, a multiple of a q8 block. With AdamW and masters in fp32 a part has 12 MiB.
 * On a disk of 2 GB/s parts of 48 MiB were 3 to 8% faster, and parts of 3 MiB 11 to 19% slower. */
enum { PART_ELEMS = 1 << 20 };

/* Places the regions of n elements end to end. Returns their bytes, whole blocks of the disk. */
static int64_t place_regions(const struct zr_flat *f, int64_t n, struct zr_state_part *part)
{
    int64_t end = zr_round_up(n * zr_plan_master_size(f), ZR_PIECE_ALIGN);
    part->master_at = end ? 0 : -1;
    for (int i = 0; i < f->n_states && f->trainable; i++) {
        part->state_at[i] = end;
        end += zr_round_up(zr_plan_state_bytes(f, n), ZR_PIECE_ALIGN);
    }
    return zr_round_up(end, ZR_DISK_ALIGN);
}

static int64_t bytes_of(const struct zr_flat *f, int64_t n)
{
    struct zr_state_part part;
    return n ? place_regions(f, n, &part) : 0;
}

void zr_plan_place_parts(struct zr_plan *p, int64_t part_elems)
{
    p->part_elems = part_elems ? part_elems : PART_ELEMS;
    for (int32_t i = 0; i < p->layout->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[i];
        int64_t kept = zr_plan_kept_elems(p, f), whole = kept / p->part_elems;
        p->file_at[i] = p->file_bytes;
        p->file_bytes += whole * bytes_of(f, p->part_elems) + bytes_of(f, kept % p->part_elems);
        p->part_bytes = zr_max(p->part_bytes, bytes_of(f, zr_min(kept, p->part_elems)));
    }
}

bool zr_plan_part(const struct zr_plan *p, const struct zr_flat *f, struct zr_span kept, int64_t k,
                  struct zr_state_part *part)
{
    int64_t from = k * p->part_elems, n = zr_min(kept.n - from, p->part_elems);
    if (n <= 0)
        return false;
    *part = (struct zr_state_part){.flat = f, .first = kept.first + from, .n = n};
    part->bytes = place_regions(f, n, part);
    part->at = p->file_at[f - p->layout->flats] + k * bytes_of(f, p->part_elems);
    return part->bytes > 0;
}
