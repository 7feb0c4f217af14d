/* SPDX-License-Identifier: Apache-2.0 */
/* job_key.h: the secret that the ranks of one job share, by which they know each other when they meet.
 *
 * It is found in the environment, or in a file that only this user may read; never on a command line, which
 * every user of a host can see. It is not printed and does not travel: ranks prove that they have it
 * (handshake.h). */
#ifndef ZR_COMM_JOB_KEY_H
#define ZR_COMM_JOB_KEY_H

#include "kernels/error.h"

#include <stdint.h>

enum { ZR_JOB_KEY_MIN_BYTES = 16, ZR_JOB_KEY_MAX_BYTES = 64 };

struct zr_job_key {
    /* 0: this job has no key */
    int32_t n_bytes;
    uint8_t bytes[ZR_JOB_KEY_MAX_BYTES];
};

/* From ZERO_JOB_KEY, 32 to 128 hex digits, or the file that ZERO_JOB_KEY_FILE names: the same digits, mode
 * 0600 or 0400, owned by this user. Neither set: 0, and n_bytes is 0. What is wrong is an error that names
 * the variable and never its value. */
int zr_job_key_find(struct zr_job_key *key);

/* 128 random bits, for whoever starts the ranks or has another way to bring it to all of them. */
int zr_job_key_make(struct zr_job_key *key);

#endif
