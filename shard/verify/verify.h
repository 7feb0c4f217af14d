/* SPDX-License-Identifier: Apache-2.0 */
/* verify.h: runs the real engine on a simulated world (kernels/sim/sim_device.h) and says whether anything
 * was wrong.
 *
 *   verify_case.c     a configuration from a seed; its text; shrinking one that fails
 *   verify_script.c   what the model does: begins, ends, steps
 *   verify_actions.c  the same of a pipeline stage, action by action
 *   verify_tensors.c  the tensors of a stage
 *   verify_compute.c  which bytes the model's compute touches
 *   verify_parts.c    what it adds up and gathers over the ranks that have its parts
 *   verify_stages.c   pipeline stages: plan, script and row of the schedule of each; sums of gradients
 *   verify_rank.c     one rank of a case: engine, plan, loop and model thread
 *   verify_snapshot.c its snapshots, and what they must hold
 *   verify_turns.c    who goes on next: model threads, loops, ranks that die
 *   verify_groups.c   the communicators of a case, by role and group
 *   verify_run.c      a case: the world below its ranks, and whether all ended as they should
 *   verify_time.c     a case on the virtual clock, of all ranks or by symmetry
 *   verify_mutants.c  schedules with one thing missing, to show that the checker would notice
 *   verify_search.c   every interleaving of small models
 *
 * A case is a handful of numbers: the same numbers give the same run. Not thread-safe: one run at a time in a
 * process. */
#ifndef ZR_SHARD_VERIFY_H
#define ZR_SHARD_VERIFY_H

#include "kernels/error.h"

#include <stdbool.h>
#include <stdint.h>

/* How the model uses its units. */
enum zr_verify_pattern {
    ZR_USE_PLAIN,     /* one after the other, and back */
    ZR_USE_NESTED,    /* unit 0 stays open around the others */
    ZR_USE_RECOMPUTE, /* a forward bracket inside each backward one */
    ZR_USE_TIED,      /* unit 0 again at the end of forward; one backward bracket held over both uses */
    ZR_USE_TWICE,     /* the same with two backward brackets: two contributions */
    ZR_USE_OVERLAP,   /* the next is begun before the one before ends */
    ZR_USE_PATTERNS
};

/* In which order a stage's actions come. */
enum zr_verify_schedule {
    ZR_RUN_GPIPE,
    ZR_RUN_1F1B,
    ZR_RUN_ANY, /* drawn; half of them with backwards apart */
    ZR_RUN_INTERLEAVED,
    ZR_RUN_ZERO_BUBBLE,
    ZR_RUN_SCHEDULES
};

/* When the loop carries out what it was given: the host's freedom. */
enum zr_verify_pace { ZR_PACE_AT_ONCE, ZR_PACE_LATE, ZR_PACE_RANDOM, ZR_PACE_MIXED, ZR_PACES };

struct zr_verify_case {
    /* of sizes, of what is skipped and when, of who goes on */
    uint64_t seed;

    int stage, world, n_units, prefetch, accum, n_steps;
    enum zr_verify_pattern pattern;
    enum zr_verify_pace pace;
    /* percent of all parameters; 0: none */
    int budget;
    /* percent of tensors */
    int frozen;
    /* percent of the uses of units left out */
    int skipped;
    /* percent of steps from which on the model uses its units in another order */
    int changes;
    /* forward passes before each step's micro-batches */
    int n_evals;
    /* the same between the last backward and the step */
    bool late_evals;
    /* percent of units, stages 0 and 1 only */
    int unbracketed;

    bool deterministic, bf16, wire_bf16, user_update, stacked, overwrite, resident, declared, reversed, sgd,
        mixed;
    /* the model computes on its own thread, as on the host */
    bool caller;
    /* reads, writes and means between steps */
    bool values;
    /* zero_step waits for the norm */
    bool wait_result;
    /* what device queries answer; see zr_sim_options */
    int event_done;
    /* this step's gradients are not finite; -1: none */
    int poison;
    /* this rank dies at this point of what it and its loop do, opening included; -1: none */
    int dead, dead_at;
    /* this allocation, stream or event fails; 0: none */
    int fail_alloc;
    /* percent of the places where a checkpoint may be taken */
    int snapshots;
    /* where the model zeroes its gradients itself: 1 at the start of a micro-batch, 2 before its backward, 4
     * after a step, 8 before it; the sum of these */
    int zeroes;
    /* it says that it does so once per step at most */
    bool grad_in_place;
    /* percent of the places where all parameters are gathered and looked at */
    int alls;
    /* percent of the steps whose norm is asked for first */
    int norms;
    /* percent of the steps before which one is begun and dropped */
    int drops;
    /* ranks that share one copy of the parameters, of a hybrid: a number that divides the world; 0: no
     * hybrid */
    int group;
    /* enum zr_hybrid: 0 none, 1 HSDP, 2 HFSDP; stage 3 only */
    int hybrid;
    /* ranks are dealt to the groups in turn, as by a launcher that goes around the hosts */
    bool dealt;
    /* elements of every tensor that stay on one rank, or all of a smaller tensor's; 0: any */
    int granule;
    /* Ranks that have all pipeline stages, and parts of each of them: their product divides the world. 0
     * and 1: it is whole.
     *
     * With stages no unit is left out, used twice or without brackets, as one stage would be refused a step
     * that others take: skipped, repeats, unbracketed and late_evals are 0, and the pattern is not
     * ZR_USE_TWICE. Where several units are open at once (patterns but PLAIN and RECOMPUTE), or a budget is
     * given, the order is declared, does not change, and no evaluation or gathering of all comes between. */
    int pp, tp;
    /* stages of a rank, also where pp is 1; 0 and 1: one. 1F1B is of one, the interleaved schedule of
     * micro-batches that divide into rounds */
    int per_rank;
    /* with stages: enum zr_verify_schedule, of accum micro-batches */
    int schedule;
    /* with pp above 1: the first stage's first unit is one tensor, which the last one's last unit is, too;
     * nothing is stacked then, nor are several micro-batches summed in place */
    bool tied;
    /* with parts: percent of units of which all parts have all, each with a gradient of its own; and of
     * uses of units around which activations are added up, cut or gathered over the parts */
    int partial, sums;
    /* 0: no; else, where the order is declared and units are used one after the other, each has two backward
     * brackets in it, and in later steps the second of them in so many percent */
    int repeats;
};

/* Its schedule has gradients of inputs and of weights apart. */
bool zr_case_is_apart(const struct zr_verify_case *c);

struct zr_verify_result {
    int64_t n_reports, n_ops, n_accesses, n_calls;
    /* the plan or the core refused the configuration: nothing ran, or it stopped early on all ranks alike */
    int refused;
    /* of all actions of all ranks */
    uint64_t action_hash;
    /* a rank died, an allocation was refused, the model changed its order */
    bool died, starved, reordered;
    /* of all ranks */
    int64_t n_snapshots;
    /* seen by mutants only: places where the mutant did something */
    int64_t n_unmatched;

    char text[ZR_ERROR_BYTES];
};

/* One thing that is missing from the schedule; see verify_mutants.c. */
struct zr_mutant;

void zr_verify_case_random(uint64_t seed, struct zr_verify_case *out);
/* It can be run: fields are in range and go together. */
bool zr_verify_possible(const struct zr_verify_case *c);
/* The model has its parameters and gradients outside brackets, too. */
bool zr_verify_model_holds(const struct zr_verify_case *c);
/* "stage=3 world=2 ..."; the same text read back gives the same case. */
void zr_verify_describe(const struct zr_verify_case *c, char *text, size_t n);
int zr_verify_parse(const char *text, struct zr_verify_case *out);

/* Runs a case. mutant may be NULL. Returns 0, or an error if it could not be run at all (no memory). What was
 * found is in *out. */
int zr_verify_run(const struct zr_verify_case *c, const struct zr_mutant *mutant,
                  struct zr_verify_result *out);
/* Makes a failing case smaller while it still fails. */
void zr_verify_shrink(struct zr_verify_case *c, const struct zr_mutant *mutant, struct zr_verify_result *out);

/* Time: a case with these speeds; step_ns of the last step and how much of it the compute stream stood. path:
 * a Chrome trace, NULL: none. */
struct zr_verify_speed {
    double flops_per_s, memory_bytes_per_s, near_bytes_per_s, far_bytes_per_s;
    int64_t launch_ns, near_ns, far_ns;
    int ranks_per_node, tokens;
    /* NCCL's rings, as ZR_SIM_LINKS_RING of kernels/sim/sim_device.h; else each rank takes from each */
    bool rings;
    int64_t unit_elems;
    /* (n_units) of a model whose units differ; NULL: all have unit_elems, of which tokens make the work */
    const struct zr_verify_unit *units;
    /* bytes for gathered parameters at stage 3; 0: what prefetch needs, or the case's budget */
    int64_t budget_bytes;
};
/* Elements, and floating-point operations of a micro-batch. A unit that is used again behind the others, as a
 * tied head is (ZR_USE_TIED), has those of that use apart. */
struct zr_verify_unit {
    int64_t elems;
    double forward_flop, backward_flop;
    double again_forward_flop, again_backward_flop;
    /* gathered for the whole step at stage 3 */
    bool resident;
};
/* Of rank 0: the last step; what it received in all steps; the plan's of one. */
struct zr_verify_time {
    int64_t step_ns, exposed_ns, compute_ns, peak_bytes, plan_bytes;
    /* Two parts of exposed_ns: from the first forward to the last backward compute stood for so long, which
     * with pipeline stages is their bubble; and from the last backward on the update waited for the norm, and
     * so for the gradients that were still being reduced. */
    int64_t bubble_ns, norm_ns;
    int64_t received_bytes, step_wire_bytes, step_outer_bytes;
    /* ranks that were simulated */
    int n_simulated;
};
int zr_verify_time(const struct zr_verify_case *c, const struct zr_verify_speed *speed, const char *path,
                   struct zr_verify_time *out, struct zr_verify_result *result);
/* The same by symmetry (comm/sim/symmetry.h): a rank of each kind is simulated and stands for all of its
 * kind, so the world may have any size (c->world; zr_verify_possible does not bound it). Not of cases with
 * granules or dealt groups, whose ranks differ. ZR_ERR_ARG: such a case, or ranks of too many kinds. */
int zr_verify_scale(const struct zr_verify_case *c, const struct zr_verify_speed *speed,
                    struct zr_verify_time *out, struct zr_verify_result *result);

/* Mutants. */
int zr_mutant_count(void);
const struct zr_mutant *zr_mutant_at(int i);
const char *zr_mutant_name(const struct zr_mutant *m);
/* Address of the bug that it re-creates, or NULL. */
const char *zr_mutant_link(const struct zr_mutant *m);
/* Tries seeds until one shows it; -1: none of n_seeds did. n_acted: in how many the mutant had anything to
 * do. */
int64_t zr_mutant_hunt(const struct zr_mutant *m, uint64_t first_seed, int64_t n_seeds, int64_t *n_acted,
                       struct zr_verify_result *out);

/* Exhaustive: every interleaving of models of 1..most_units units on 2..most_ranks ranks; see
 * verify_search.c. */
struct zr_search_result {
    int64_t n_configs, n_states, n_edges, n_bad;
    char text[1024];
};
/* To show that the search would notice: the model's thread never waits for the loop; a job is never given to
 * it. */
enum zr_search_flaw { ZR_SEARCH_SOUND, ZR_SEARCH_NO_AWAIT, ZR_SEARCH_NO_PUSH };
int zr_verify_search(int32_t most_units, int32_t most_ranks, enum zr_search_flaw flaw,
                     struct zr_search_result *out);

#endif
