/* SPDX-License-Identifier: Apache-2.0 */
/* zero_run_variables.c: sets the variables that zero-run sets for ranks on GPUs, unless they are set. Without
 * them operations of several communicators may wait for each other, on the stand-in as on a GPU. */
#include <stdlib.h>

__attribute__((constructor)) static void set_variables(void)
{
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}
