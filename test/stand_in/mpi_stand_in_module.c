/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_stand_in_module.c: the stand-in as libzero's MPI module, which libzero loads by itself, for tests of
 * the whole library. Ranks are threads that have called mpi_stand_in_be, which the module also exports. */
#include "test/stand_in/mpi_stand_in.h"

#define SHOWN __attribute__((visibility("default")))

extern SHOWN struct zr_mpi_shim zero_mpi_shim_1;
SHOWN struct zr_mpi_shim zero_mpi_shim_1;

__attribute__((constructor)) static void fill_table(void)
{
    zero_mpi_shim_1 = *mpi_stand_in_shim();
    zero_mpi_shim_1.name = "Open MPI, by the stand-in"; /* fits the launcher's variables in the tests */
    mpi_stand_in_the_machine()->n_ranks = MPI_STAND_IN_RANKS;
}
