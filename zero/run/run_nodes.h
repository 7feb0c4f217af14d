/* SPDX-License-Identifier: Apache-2.0 */
/* run_nodes.h: the nodes of a job: how they meet, compare what they were given, and talk afterwards.
 *
 * To the rendezvous (comm/meet/rendezvous.h) a node is a rank, and node 0, which leads, is rank 0: the others
 * prove to it that they have the job's key, and it to them, before anything is said. Links stay open, and
 * beats find one that is cut without a word. */
#ifndef ZR_ZERO_RUN_NODES_H
#define ZR_ZERO_RUN_NODES_H

#include "zero/run/run.h"

enum zr_run_word {
    /* node 0 -> node: start these ranks; text: why again, "" at first */
    ZR_RUN_START = 1,
    /* node 0 -> node: end them; text: why */
    ZR_RUN_END,
    /* both ways: this node got a signal, which is for all ranks; number: which */
    ZR_RUN_SIGNAL,
    /* node 0 -> node: the job is over; number: the exit code; text: "" or why there is no other attempt */
    ZR_RUN_QUIT,
    /* node -> node 0: the first failure here */
    ZR_RUN_FAILED,
    /* node -> node 0: all ranks are gone, which had reached; number: 1 where processes of theirs are not */
    ZR_RUN_OVER
};

struct zr_run_failure {
    enum {
        ZR_RUN_RANK_ENDED = 1,
        /* code: a libuv error */
        ZR_RUN_NOT_STARTED,
        /* standard output; code: an errno */
        ZR_RUN_OUTPUT_LOST,
        ZR_RUN_NODE_LOST
    } kind;
    int node, rank;
    int code;
    /* that killed the rank; 0 */
    int signal;
    /* ranks of this node that live; known there alone */
    int n_others;
    /* of a rank that ended: "; its last call was ...", or "" */
    char last[ZR_RUN_LAST_CHARS];
};

struct zr_run_message {
    enum zr_run_word word;
    int number;
    struct zr_run_failure failure;
    struct zr_run_start start;
    struct zr_run_reached reached;
    char text[640];
};

/* What a node says of itself. */
struct zr_run_member {
    char host[80];
    int n_ranks;
};

struct zr_run_nodes;

/* Collective, blocks up to o->meet_ms; runs the loop. Afterwards of[k] is node k. On failure (a code of
 * kernels/error.h) the thread's message says why, in words of nodes. With one node there is nothing to do. */
int zr_run_nodes_meet(const struct zr_run_options *o, uv_loop_t *loop, struct zr_run_nodes **out);
const struct zr_run_member *zr_run_nodes_of(const struct zr_run_nodes *n, int node);

/* From now on, on the loop: messages, and nodes that are lost, each once. */
void zr_run_nodes_watch(struct zr_run_nodes *n,
                        void (*on_message)(void *arg, int from, const struct zr_run_message *m),
                        void (*on_lost)(void *arg, int node, const char *why), void *arg);
/* To node 0, or from it to another. One that is lost gets nothing. */
void zr_run_nodes_send(struct zr_run_nodes *n, int to, const struct zr_run_message *m);
/* Says goodbye; runs the loop for a moment. NULL is allowed. */
void zr_run_nodes_close(struct zr_run_nodes *n);

#endif
