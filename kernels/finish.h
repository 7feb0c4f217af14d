/* finish.h: the end of a step's agreement, as device.h defines it (struct zr_finish). */
#ifndef ZR_KERNELS_FINISH_H
#define ZR_KERNELS_FINISH_H

#include "kernels/device.h"

/* On memory that the calling thread may touch. */
void zr_finish_step(const struct zr_finish *f);

#endif
