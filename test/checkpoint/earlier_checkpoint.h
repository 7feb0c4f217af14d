/* SPDX-License-Identifier: Apache-2.0 */
/* earlier_checkpoint.h: how the files of a checkpoint of an earlier library stand in a test. */
#ifndef TEST_EARLIER_CHECKPOINT_H
#define TEST_EARLIER_CHECKPOINT_H

struct earlier_file {
    const char *name;
    int bytes;
    /* its contents, two digits a byte */
    const char *hex;
};

#endif
