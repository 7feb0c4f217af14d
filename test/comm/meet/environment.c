/* SPDX-License-Identifier: Apache-2.0 */
/* environment.c: sets and clears the variables that launchers use. */
#include "test/comm/meet/environment.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

static const char *const known[] = {"ZERO_RANK",
                                    "ZERO_WORLD_SIZE",
                                    "ZERO_LOCAL_RANK",
                                    "ZERO_RENDEZVOUS",
                                    "ZERO_JOB",
                                    "ZERO_ATTEMPT",
                                    "ZERO_JOB_KEY",
                                    "ZERO_JOB_KEY_FILE",
                                    "RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "TORCHELASTIC_USE_AGENT_STORE",
                                    "TORCHELASTIC_RUN_ID",
                                    "TORCHELASTIC_RESTART_COUNT",
                                    "LOCAL_WORLD_SIZE",
                                    "GROUP_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_LOCAL_RANK",
                                    "PMIX_NAMESPACE",
                                    "OMPI_MCA_ess_base_jobid",
                                    "PMI_RANK",
                                    "PMI_SIZE",
                                    "PMI_FD",
                                    "MPI_LOCALRANKID",
                                    "PMI_JOBID",
                                    "PMI_KVSNAME",
                                    "SLURM_STEP_NUM_NODES",
                                    "SLURM_NNODES",
                                    "SLURM_STEP_NODELIST",
                                    "SLURM_JOB_NODELIST",
                                    "SLURMD_NODENAME",
                                    "SLURM_HET_SIZE",
                                    "OMPI_COMM_WORLD_LOCAL_SIZE",
                                    "MPI_LOCALNRANKS",
                                    "SLURM_PROCID",
                                    "SLURM_NTASKS",
                                    "SLURM_STEP_NUM_TASKS",
                                    "SLURM_LOCALID",
                                    "SLURM_CLUSTER_NAME",
                                    "SLURM_JOB_ID",
                                    "SLURM_STEP_ID",
                                    "SLURM_TASK_PID",
                                    "SLURM_RESTART_COUNT"};

void environment(const char *name, ...)
{
    va_list ap;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        unsetenv(known[i]);
    va_start(ap, name);
    for (; name; name = va_arg(ap, const char *))
        setenv(name, va_arg(ap, const char *), 1);
    va_end(ap);
}
