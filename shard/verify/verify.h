/* SPDX-License-Identifier: Apache-2.0 */
/* verify.h: runs the real engine on simulated ranks (kernels/sim/sim_device.h) and reports every race and
 * wrong value.
 *
 *   verify_case.c     a configuration (a case) from a seed; as text; made smaller
 *   verify_script.c   the calls that the model makes: begins, ends, steps
 *   verify_actions.c  the same for a pipeline stage, action by action
 *   verify_tensors.c  the tensors of a pipeline stage
 *   verify_compute.c  the bytes that the model's compute touches
 *   verify_axis.c     the model's collectives and shifts over tp and cp
 *   verify_stages.c   each pipeline stage's plan, script and schedule; expected gradients
 *   verify_rank.c     one rank: engine, plan, loop and model thread
 *   verify_snapshot.c a rank's snapshots and their expected contents
 *   verify_turns.c    which thread runs next; ranks that die
 *   verify_groups.c   the communicators of a case, by role and group
 *   verify_run.c      runs a case and checks that every rank ended as it should
 *   verify_time.c     a case on the virtual clock, with all ranks or by symmetry
 *   verify_mutants.c  schedules with one thing missing, which the checker must notice
 *   verify_search.c   every interleaving of the host threads of small models
 *
 * A case is a set of numbers, and the same numbers give the same run. The verifier is not thread-safe: run
 * one case at a time in a process. */
#ifndef ZR_SHARD_VERIFY_H
#define ZR_SHARD_VERIFY_H

#include "kernels/error.h"

#include <stdbool.h>
#include <stdint.h>

/* How the model uses its units. */
enum zr_verify_pattern {
    ZR_USE_PLAIN,     /* one after the other, then back */
    ZR_USE_NESTED,    /* unit 0 stays open around the others */
    ZR_USE_RECOMPUTE, /* a forward bracket inside each backward bracket */
    ZR_USE_TIED,      /* unit 0 is used again at the end of forward; one backward bracket spans both uses */
    ZR_USE_TWICE,     /* like TIED, with two backward brackets, so two contributions */
    ZR_USE_OVERLAP,   /* each unit begins before the previous one ends */
    ZR_USE_PATTERNS
};

/* The order of a pipeline stage's actions. */
enum zr_verify_schedule {
    ZR_RUN_GPIPE,
    ZR_RUN_1F1B,
    ZR_RUN_ANY, /* a random valid order; half of these split backward into inputs and weights */
    ZR_RUN_INTERLEAVED,
    ZR_RUN_ZERO_BUBBLE,
    ZR_RUN_SCHEDULES
};

/* How soon the loop issues the jobs that it was given. */
enum zr_verify_pace { ZR_PACE_AT_ONCE, ZR_PACE_LATE, ZR_PACE_RANDOM, ZR_PACE_MIXED, ZR_PACES };

struct zr_verify_case {
    /* Seed of everything drawn: sizes, skipped uses, and which thread runs next. */
    uint64_t seed;

    int stage, world, n_units, prefetch, accum, n_steps;
    enum zr_verify_pattern pattern;
    enum zr_verify_pace pace;
    /* Parameter budget, in percent of all parameters. 0: none. */
    int budget;
    /* Percent of tensors that are frozen. */
    int frozen;
    /* Percent of uses of units that the model leaves out. */
    int skipped;
    /* Percent of steps at which the model changes the order of its units. */
    int changes;
    /* Forward passes before each step's micro-batches. */
    int n_evals;
    /* Also run forward passes between the last backward and the step. */
    bool late_evals;
    /* Percent of units that are used without brackets. ZeRO stages 0 and 1 only. */
    int unbracketed;

    /* Options of the configuration: deterministic sums, and bf16 collectives of gradients. */
    bool deterministic, wire_bf16;
    /* The program updates the weights; the optimizer is SGD instead of AdamW; tensors have several kinds. */
    bool user_update, sgd, mixed;
    /* Some tensors are bf16; one is stacked; some gradients are overwritten; some parameters are resident. */
    bool bf16, stacked, overwrite, resident;
    /* The order is declared; units are used from the last to the first. */
    bool declared, reversed;
    /* The model computes on its own thread, as it does on the host. */
    bool caller;
    /* Reads, writes and means between steps. */
    bool values;
    /* zero_step waits for the norm. */
    bool wait_result;
    /* The answer of device queries; see zr_sim_options. */
    int event_done;
    /* The step whose gradients are not finite. -1: none. */
    int poison;
    /* The rank that dies (-1: none), and the number of its last point. Points are counted over its model
     * thread and its loop, from opening on. */
    int dead, dead_at;
    /* The number of the allocation, stream or event that fails. 0: none. */
    int fail_alloc;
    /* Percent of the places where a checkpoint may be taken. */
    int snapshots;
    /* Places at which the model zeroes its gradients itself. A sum of 1 (at the start of a micro-batch),
     * 2 (before its backward), 4 (after a step) and 8 (before a step). */
    int zeroes;
    /* The model promises to zero its gradients at most once per step. */
    bool grad_in_place;
    /* Percent of the places where all parameters are gathered and checked. */
    int alls;
    /* Percent of the steps that are preceded by a call of zero_norm. */
    int norms;
    /* Percent of the steps that are preceded by a step that is begun and dropped. */
    int drops;
    /* With a hybrid: ranks that share one copy of the parameters. It divides the world. 0: no hybrid. */
    int group;
    /* enum zr_hybrid: 0 none, 1 HSDP, 2 HFSDP. ZeRO stage 3 only. */
    int hybrid;
    /* Ranks go to the groups round-robin, as with a launcher that cycles through the hosts. */
    bool dealt;
    /* Elements of a tensor that stay together on one rank; a smaller tensor stays whole. 0: any split. */
    int granule;
    /* Pipeline and tensor-parallel size. 0 and 1: none. Their product divides the world.
     *
     * With pipeline stages, one stage must not be refused a step that the others take. So skipped, repeats,
     * unbracketed and late_evals are 0, and the pattern is not ZR_USE_TWICE. If several units are open at
     * once (patterns other than PLAIN and RECOMPUTE), or a budget is given, three more rules apply. The order
     * is declared, it does not change, and no evaluation or gathering of all parameters comes between. */
    int pp, tp;
    /* Pipeline stages per rank, also where pp is 1. 0 and 1: one. 1F1B needs one per rank. The interleaved
     * schedule needs micro-batches that divide into rounds. */
    int per_rank;
    /* With pipeline stages: enum zr_verify_schedule, with accum micro-batches. */
    int schedule;
    /* With pp above 1: the first pipeline stage's first unit and the last one's last unit are one shared
     * tensor. Then nothing is stacked, and micro-batches are not summed in place. */
    bool tied;
    /* With tensor parallelism: percent of units that every tensor-parallel rank holds whole, each with its
     * own partial gradient. Then percent of uses of units that are followed by a collective of activations
     * over those ranks, or by the beginning or end of a shift. */
    int partial, sums;
    /* Not 0, where the order is declared and units are used one after the other: the declared order has two
     * backward brackets of each unit. Later steps have the second one in this percentage of cases. */
    int repeats;
    /* Ranks along cp, which divide the data-parallel ranks. 0 and 1: none. Then percent of uses of units that
     * are followed by a collective or a shift over them. */
    int cp, moves;
    /* The communicators move arrays of the model themselves, as NCCL's do. */
    bool arrays;
    /* enum zero_states: the memory that holds masters and states. */
    int states;
    /* enum zero_masters and zero_moments: how masters of bf16 tensors and states are kept. If tensors have
     * several kinds of optimizers, every second kind keeps fp32. */
    int masters, moments;
    /* Gradient sums of bf16 tensors are bf16. */
    bool sums_bf16;
};

/* Whether the schedule computes the gradients of inputs and of weights in separate actions. */
bool zr_case_is_apart(const struct zr_verify_case *c);

struct zr_verify_result {
    int64_t n_reports, n_ops, n_accesses, n_calls;
    /* The error with which the plan or the core refused the configuration. The run then did not start, or it
     * stopped early at the same call on all ranks. */
    int refused;
    /* Hash of all actions of all ranks. */
    uint64_t action_hash;
    /* A rank died; an allocation was refused; the model changed its order. */
    bool died, starved, reordered;
    /* Snapshots read, over all ranks. */
    int64_t n_snapshots;
    /* For mutants: number of places where the mutant changed something. */
    int64_t n_acted;

    char text[ZR_ERROR_BYTES];
};

/* One thing that is missing from the schedule; see verify_mutants.c. */
struct zr_mutant;

void zr_verify_case_random(uint64_t seed, struct zr_verify_case *out);
/* Whether the case can be run: its fields are in range and consistent. */
bool zr_verify_possible(const struct zr_verify_case *c);
/* Whether the model has its parameters and gradients outside brackets, too. */
bool zr_verify_model_holds(const struct zr_verify_case *c);
/* Writes "stage=3 world=2 ...". zr_verify_parse reads this text back into the same case. */
void zr_verify_describe(const struct zr_verify_case *c, char *text, size_t n);
int zr_verify_parse(const char *text, struct zr_verify_case *out);

/* Runs a case; mutant may be NULL. *out has the findings. Returns 0, or an error if the case could not be run
 * at all (no memory). */
int zr_verify_run(const struct zr_verify_case *c, const struct zr_mutant *mutant,
                  struct zr_verify_result *out);
/* Makes a failing case smaller while it still fails. */
void zr_verify_shrink(struct zr_verify_case *c, const struct zr_mutant *mutant, struct zr_verify_result *out);

/* Speeds of the simulated machine, for zr_verify_time and zr_verify_scale. */
struct zr_verify_speed {
    double flops_per_s, memory_bytes_per_s, near_bytes_per_s, far_bytes_per_s;
    /* Link to the memory that has masters and states. 0: they are in the device's memory. */
    double states_bytes_per_s;
    int64_t launch_ns, near_ns, far_ns;
    int ranks_per_node, tokens;
    /* Collectives run as NCCL's rings (ZR_SIM_LINKS_RING in kernels/sim/sim_device.h). Otherwise each rank
     * receives from each other rank directly. */
    bool rings;
    int64_t unit_elems;
    /* (n_units) Sizes of units that differ. NULL: all have unit_elems, and their work follows from tokens. */
    const struct zr_verify_unit *units;
    /* Bytes for gathered parameters at ZeRO stage 3. 0: what prefetch needs, or the case's budget. */
    int64_t budget_bytes;
};
/* Elements of a unit and its floating-point operations per micro-batch. The second use of a tied unit
 * (ZR_USE_TIED) has its own counts. */
struct zr_verify_unit {
    int64_t elems;
    double forward_flop, backward_flop;
    double again_forward_flop, again_backward_flop;
    /* Gathered for the whole step at ZeRO stage 3. */
    bool resident;
};
/* Figures of rank 0: times of the last step, bytes received in all steps, and the plan's bytes of one
 * step. */
struct zr_verify_time {
    int64_t step_ns, exposed_ns, compute_ns, peak_bytes, plan_bytes;
    /* With states in host memory: bytes of masters and states, which are part of peak_bytes. */
    int64_t states_bytes;
    /* Two parts of exposed_ns. bubble_ns is idle time of the compute stream from the first forward to the
     * last backward. With pipeline stages this is the bubble. norm_ns is the time from the last backward
     * until the norm is known, while the last gradients are reduced. */
    int64_t bubble_ns, norm_ns;
    int64_t received_bytes, step_wire_bytes, step_outer_bytes;
    /* Ranks that were simulated. */
    int n_simulated;
};
int zr_verify_time(const struct zr_verify_case *c, const struct zr_verify_speed *speed, const char *path,
                   struct zr_verify_time *out, struct zr_verify_result *result);
/* The same by symmetry (comm/sim/symmetry.h): simulates one rank of each kind, so c->world may have any size.
 * zr_verify_possible does not limit it. Returns ZERO_ERR_ARG for cases whose ranks differ (granules, dealt
 * groups) and for too many kinds of ranks. */
int zr_verify_scale(const struct zr_verify_case *c, const struct zr_verify_speed *speed,
                    struct zr_verify_time *out, struct zr_verify_result *result);

int zr_mutant_count(void);
const struct zr_mutant *zr_mutant_at(int i);
const char *zr_mutant_name(const struct zr_mutant *m);
/* Address of the bug report that the mutant re-creates, or NULL. */
const char *zr_mutant_link(const struct zr_mutant *m);
/* Tries n_seeds seeds and returns the first that shows the mutant, or -1. *n_acted: seeds in which the mutant
 * changed something. */
int64_t zr_mutant_hunt(const struct zr_mutant *m, uint64_t first_seed, int64_t n_seeds, int64_t *n_acted,
                       struct zr_verify_result *out);

/* Visits every interleaving of models of 1..most_units units on 2..most_ranks ranks; see verify_search.c. */
struct zr_search_result {
    int64_t n_configs, n_states, n_edges, n_bad;
    char text[1024];
};
/* Flaws that the search must notice: the model thread never waits for the loop; one job is never pushed. */
enum zr_search_flaw { ZR_SEARCH_SOUND, ZR_SEARCH_NO_AWAIT, ZR_SEARCH_NO_PUSH };
int zr_verify_search(int32_t most_units, int32_t most_ranks, enum zr_search_flaw flaw,
                     struct zr_search_result *out);

#endif
