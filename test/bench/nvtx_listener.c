/* SPDX-License-Identifier: Apache-2.0 */
/* nvtx_listener.c: a profiler of NVTX 3, loaded through NVTX_INJECTION64_PATH. It writes the events of the
 * domain "libzero" to descriptor 2, one per line: "nvtx PID THREAD push|pop|begin|end NAME". */
#include <nvtx3/nvToolsExt.h>

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table);

static int ours;
static nvtxDomainHandle_t const domain = (nvtxDomainHandle_t)&ours;
static atomic_ullong n_ranges;

static void say(const char *what, const char *name)
{
    char line[160];
    int n = snprintf(line, sizeof line, "nvtx %d %ld %s %s\n", (int)getpid(), (long)syscall(SYS_gettid), what,
                     name);
    (void)!write(2, line, (size_t)n);
}

static nvtxDomainHandle_t create(const char *name)
{
    return strcmp(name, "libzero") ? NULL : domain;
}

static void destroy(nvtxDomainHandle_t d)
{
    say("destroy", d == domain ? "libzero" : "another");
}

static int push(nvtxDomainHandle_t d, const nvtxEventAttributes_t *a)
{
    if (d == domain)
        say("push", a->message.ascii);
    return 0;
}

static int pop(nvtxDomainHandle_t d)
{
    if (d == domain)
        say("pop", "-");
    return 0;
}

static nvtxRangeId_t begin(nvtxDomainHandle_t d, const nvtxEventAttributes_t *a)
{
    char name[96];
    nvtxRangeId_t id = atomic_fetch_add(&n_ranges, 1) + 1;
    snprintf(name, sizeof name, "%llu %s", (unsigned long long)id, a->message.ascii);
    if (d == domain)
        say("begin", name);
    return id;
}

static void end(nvtxDomainHandle_t d, nvtxRangeId_t id)
{
    char name[32];
    snprintf(name, sizeof name, "%llu", (unsigned long long)id);
    if (d == domain)
        say("end", name);
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table)
{
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) ||
        size <= NVTX_CBID_CORE2_DomainDestroy)
        return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
    *table[NVTX_CBID_CORE2_DomainDestroy] = (NvtxFunctionPointer)destroy;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    *table[NVTX_CBID_CORE2_DomainRangeStartEx] = (NvtxFunctionPointer)begin;
    *table[NVTX_CBID_CORE2_DomainRangeEnd] = (NvtxFunctionPointer)end;
    return 1;
}
