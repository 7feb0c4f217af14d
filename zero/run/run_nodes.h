/* SPDX-License-Identifier: Apache-2.0 */
/* run_nodes.h: the nodes of a job: how they meet, compare their options and exchange messages.
 *
 * To the rendezvous (comm/meet/rendezvous.h) a node is a rank, and node 0, which leads, is rank 0. Node 0 and
 * each other node first prove to each other that they have the job's key. Connections stay open, and
 * heartbeats detect one that was cut silently. */
#ifndef ZR_ZERO_RUN_NODES_H
#define ZR_ZERO_RUN_NODES_H

#include "zero/run/run.h"

enum zr_run_word {
    /* node 0 -> node: start these ranks. text: the reason for a restart, "" at first */
    ZR_RUN_START = 1,
    /* node 0 -> node: end them. text: the reason */
    ZR_RUN_END,
    /* both ways: this node got a signal, which is for all ranks. number: the signal */
    ZR_RUN_SIGNAL,
    /* node 0 -> node: the job is over. number: the exit code. text: "", or why there is no other attempt */
    ZR_RUN_QUIT,
    /* node -> node 0: the first failure here */
    ZR_RUN_FAILED,
    /* node -> node 0: all ranks are gone. reached: how far they came. number: 1 if processes of theirs
     * remain */
    ZR_RUN_OVER
};

struct zr_run_failure {
    enum {
        ZR_RUN_RANK_ENDED = 1,
        /* code: a libuv error */
        ZR_RUN_NOT_STARTED,
        /* standard output failed. code: an errno */
        ZR_RUN_OUTPUT_LOST,
        ZR_RUN_NODE_LOST
    } kind;
    int node, rank;
    int code;
    /* Signal that killed the rank. 0: none. */
    int signal;
    /* Ranks of this node that are alive. Known on this node alone. */
    int n_others;
    /* For a rank that ended: "; its last call was ...", or "". */
    char last[ZR_RUN_MESSAGE_BYTES];
};

struct zr_run_message {
    enum zr_run_word word;
    int number;
    struct zr_run_failure failure;
    struct zr_run_assignment assignment;
    struct zr_run_reached reached;
    char text[640];
};

/* A node's report about itself. */
struct zr_run_member {
    char host[80];
    int n_ranks;
};

struct zr_run_nodes;

/* Lets all nodes meet. Collective. Blocks for up to o->meet_ms, and runs the loop. Afterwards zr_run_nodes_of
 * gives each node's report. On failure (a code of kernels/error.h) this thread's message has the reason, in
 * terms of nodes. With one node nothing is exchanged. */
int zr_run_nodes_meet(const struct zr_run_options *o, uv_loop_t *loop, struct zr_run_nodes **out);
const struct zr_run_member *zr_run_nodes_of(const struct zr_run_nodes *n, int node);

/* Reports messages from now on, and each node that is lost once. The callbacks run on the loop. */
void zr_run_nodes_watch(struct zr_run_nodes *n,
                        void (*on_message)(void *arg, int from, const struct zr_run_message *m),
                        void (*on_lost)(void *arg, int node, const char *why), void *arg);
/* Sends to node 0, or from node 0 to another node. A lost node gets nothing. */
void zr_run_nodes_send(struct zr_run_nodes *n, int to, const struct zr_run_message *m);
/* Closes the connections, which runs the loop for a moment. NULL is allowed. */
void zr_run_nodes_close(struct zr_run_nodes *n);

#endif
