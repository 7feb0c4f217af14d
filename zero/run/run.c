/* SPDX-License-Identifier: Apache-2.0 */
/* run.c: zero-run -n N program args...: parses and checks the command line, and runs the job. */
#include "zero/run/run.h"
#include "comm/meet/meeting_point.h"
#include "kernels/limits.h"
#include "kernels/standard_fds.h"
#include "zero/zero.h"

#include <argp.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    EXIT_USAGE = 2,
    RANKS_MAX = 4096,
    NODES_MAX = 1024,
    RESTARTS_MAX = 1000000,
    SECONDS_MAX = 86400,
    MEET_S = 300, /* a batch system such as Slurm may start one node after another */
    SILENT_S = 20 /* for a node that is cut off; one that ends is noticed at once */
};

static int usage_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Prints an error in one line. argp's own function would add a second line. */
static int usage_error(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fputs("zero-run: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputs(" (see zero-run --help)\n", stderr);
    va_end(ap);
    return EXIT_USAGE;
}

/* Makes a key of 128 random bits, as hex digits. It is only in the environment of the ranks, because every
 * user can see command lines. */
static bool make_key(char key[ZR_RUN_KEY_BYTES])
{
    unsigned char bytes[ZR_JOB_KEY_MIN_BYTES];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return false;
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(key + 2 * i, 3, "%02x", bytes[i]);
    return true;
}

static bool parse_count(const char *text, int lo, int hi, int *out)
{
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || n < lo || n > hi)
        return false;
    *out = (int)n;
    return true;
}

enum {
    KEY_RAW = 256,
    KEY_PORT,
    KEY_RESTARTS,
    KEY_MIN_RANKS,
    KEY_ALLOW,
    KEY_FLIGHT,
    KEY_NODES,
    KEY_NODE,
    KEY_RDZV,
    KEY_RDZV_TIMEOUT,
    KEY_NODE_TIMEOUT
};

/* Parses a whole number. If it is not allowed, ends with an error that names the option. */
static int parse_count_or_exit(const char *option, const char *text, int lo, int hi)
{
    int n;
    if (!parse_count(text, lo, hi, &n))
        exit(usage_error("%s is \"%s\"; allowed: %d to %d", option, text, lo, hi));
    return n;
}

/* Parses where nodes meet: HOST:PORT, which may have tcp:// before it, or file:///PATH. */
static void parse_meeting(const char *text, struct zr_run_options *o)
{
    struct zr_world parsed = {0};
    bool is_url = !strncmp(text, "tcp://", 6) || !strncmp(text, "file://", 7);
    char url[sizeof parsed.file + 8];
    int n = snprintf(url, sizeof url, "%s%s", is_url ? "" : "tcp://", text);
    if (n >= (int)sizeof url || zr_meeting_url("--rdzv", url, &parsed))
        exit(usage_error(
            "--rdzv is \"%.300s\"; allowed: HOST:PORT or [IPV6]:PORT, of node 0, or file:///PATH", text));
    memcpy(o->meet_host, parsed.host, sizeof o->meet_host);
    memcpy(o->meet_file, parsed.file, sizeof o->meet_file);
    o->meet_port = parsed.port;
}

/* Parses an option about several nodes. Returns false if key is another option. */
static bool parse_node_option(int key, const char *arg, struct zr_run_options *o)
{
    switch (key) {
    case KEY_NODES:
        o->n_nodes = parse_count_or_exit("--nnodes", arg, 1, NODES_MAX);
        return true;
    case KEY_NODE:
        o->node = parse_count_or_exit("--node-rank", arg, 0, NODES_MAX - 1);
        return true;
    case KEY_RDZV:
        parse_meeting(arg, o);
        return true;
    case KEY_RDZV_TIMEOUT:
        o->meet_ms = 1000LL * parse_count_or_exit("--rdzv-timeout", arg, 1, SECONDS_MAX);
        return true;
    case KEY_NODE_TIMEOUT:
        o->silent_ms = 1000LL * parse_count_or_exit("--node-timeout", arg, 1, SECONDS_MAX);
        return true;
    default:
        return false;
    }
}

/* Passes the folder to the ranks in their environment. Makes it if it is missing. */
static void use_flight_folder(const char *arg)
{
    char *path = *arg && (mkdir(arg, 0777) == 0 || errno == EEXIST) ? realpath(arg, NULL) : NULL;
    bool usable = path && access(path, W_OK | X_OK) == 0;
    int why = errno;
    if (usable)
        setenv("ZERO_FLIGHT_DIR", path, 1);
    free(path);
    if (!usable)
        exit(usage_error("--flight is \"%s\": %s", arg, *arg ? strerror(why) : "a folder is wanted"));
}

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    struct zr_run_options *o = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->err_stream = NULL; /* getopt has printed the error; argp would only add a hint */
        break;
    case 'n':
        o->n_ranks = parse_count_or_exit("-n", arg, 1, RANKS_MAX);
        break;
    case KEY_RAW:
        o->raw = true;
        break;
    case KEY_PORT:
        o->port = parse_count_or_exit("--port", arg, 1, 65535);
        break;
    case KEY_RESTARTS:
        o->limits.restarts = parse_count_or_exit("--restarts", arg, 0, RESTARTS_MAX);
        break;
    case KEY_MIN_RANKS:
        o->limits.min_ranks = parse_count_or_exit("--min-ranks", arg, 1, RANKS_MAX);
        break;
    case KEY_ALLOW:
        o->limits.allow_batch_change = true;
        break;
    case KEY_FLIGHT:
        use_flight_folder(arg);
        break;
    case ARGP_KEY_ARGS:
        o->argv = state->argv + state->next;
        break;
    default:
        return parse_node_option(key, arg, o) ? 0 : ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static const struct argp_option options[] = {
    {"ranks", 'n', "N", 0, "How many ranks to start on this node", 0},
    {"nproc-per-node", 0, NULL, OPTION_ALIAS, NULL, 0},
    {"raw", KEY_RAW, NULL, 0, "Ranks write to the terminal or file themselves, without prefix", 0},
    {"port", KEY_PORT, "P", 0, "MASTER_PORT; default: a free one, another one after a restart", 0},
    {"restarts", KEY_RESTARTS, "R", 0,
     "How often all ranks are started again after one has failed; default: 0", 0},
    {"max-restarts", 0, NULL, OPTION_ALIAS, NULL, 0},
    {"min-ranks", KEY_MIN_RANKS, "M", 0,
     "After the loss of a node, restart with no fewer than M ranks; default: all", 0},
    {"allow-batch-change", KEY_ALLOW, NULL, 0,
     "Restart with fewer ranks even if that changes the number of micro-batches in a step", 0},
    {"flight", KEY_FLIGHT, "DIR", 0,
     "Folder for the ranks' flight recorders when one fails or is killed (zero-bench flight reads them); "
     "default: ZERO_FLIGHT_DIR, else none",
     0},
    {"nnodes", KEY_NODES, "N", 0, "Number of nodes, each with its own zero-run; default: 1", 1},
    {"node-rank", KEY_NODE, "K", 0, "Number of this node, 0 to N - 1", 1},
    {"rdzv", KEY_RDZV, "HOST:PORT", 0,
     "Host of node 0, and a port that is free there; or file:///PATH, a folder or file that all nodes share",
     1},
    {"rdzv-endpoint", 0, NULL, OPTION_ALIAS, NULL, 1},
    {"rdzv-timeout", KEY_RDZV_TIMEOUT, "S", 0, "Seconds to wait for all nodes at the beginning; default: 300",
     1},
    {"node-timeout", KEY_NODE_TIMEOUT, "S", 0,
     "Seconds after which a node that is silent is lost; default: 20", 1},
    {0}};

static const char doc[] =
    "Starts the ranks of a program on this node, and waits for them. With --nnodes they are part of a "
    "larger job.\vEach rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, "
    "MASTER_PORT, ZERO_JOB, ZERO_ATTEMPT, ZERO_PROGRESS and ZERO_JOB_KEY (a random key by which the ranks "
    "recognize each other) in its environment. zero-run also sets OMP_NUM_THREADS to the number of cores "
    "divided by N, and for GPUs NCCL_LAUNCH_ORDER_IMPLICIT to 1 and CUDA_DEVICE_MAX_CONNECTIONS to 32, "
    "unless they are set already. Variables of other launchers are removed.\n\nzero-run keeps each rank's "
    "last call of libzero (ZERO_FLIGHT_FD), and can read it after the rank has ended. So the message about "
    "a rank that fails or is killed names that call.\n\nOutput is forwarded line by line, as it is "
    "written, with \"[rank] \" before each line. Lines above 1 MiB come in pieces. A rank's standard "
    "output is a pseudo-terminal, so that its program does not hold lines back. TERM is dumb unless "
    "zero-run's own output is a terminal. With --raw, or when pseudo-terminals run out, a program may hold "
    "lines back until it ends. Standard input goes to rank 0.\n\nSIGINT, SIGTERM, SIGHUP, SIGUSR1 and "
    "SIGUSR2 are forwarded to every rank. Each rank leads its own session and process group. A second "
    "SIGINT, SIGTERM or SIGHUP ends the ranks as a failure does, and a third one ends them at once. If a "
    "rank fails, all ranks are ended: the others get SIGTERM, and 2 s later all that is left, with every "
    "process that ranks have started, gets SIGKILL. If zero-run itself is killed, even by SIGKILL, every "
    "rank is killed too, but "
    "not the processes that ranks have started.\n\nWith --restarts R the ranks are then started again, up "
    "to R times, with ZERO_ATTEMPT one higher. Before that, the earlier ranks and all their processes have "
    "ended. The program must continue from its last save. Standard input that it has read is gone. "
    "zero-run does not restart a job that a signal asked it to end, or a program that cannot be run (126, "
    "127). Nor does it restart a job that reached no new step in two restarts in a row, according to "
    "libzero's records. With fewer ranks it sets ZERO_GRAD_ACCUM_STEPS, so that a step has as many "
    "micro-batches as before.\n\nWith --nnodes N, start zero-run on N nodes, each with its own "
    "--node-rank. -n may differ. All need the same ZERO_JOB_KEY or ZERO_JOB_KEY_FILE (openssl rand -hex 16 "
    "makes a key). Node 0 leads. Ranks are numbered node by node, and start when all nodes have come. If a "
    "rank fails on any node, the ranks of all nodes are ended. A signal to any zero-run is forwarded to "
    "the ranks of all nodes. Each node shows the output of its own ranks. With --rdzv file:///PATH node 0 "
    "writes its address there, and the ranks meet by that file too (ZERO_RENDEZVOUS). MASTER_ADDR is then "
    "the host name of node 0. If node 0 is lost, the job ends. If another node is lost, the attempt ends. "
    "With --min-ranks the job then restarts without that node.\n\nExit code: 0, or that of the rank that "
    "failed first (in the last attempt), or 128 + its signal; 127 if the program is not found, 126 if it "
    "cannot be run, 2 for a bad command line, 141 if nobody reads the output any longer.";

/* With several nodes, takes the key from the environment. It must be equal on all nodes, and the ranks get
 * it too. */
static int take_key(struct zr_run_options *o)
{
    struct zr_job_key key;
    if (zr_job_key_find(&key)) {
        fprintf(stderr, "zero-run: %s\n", zr_error_text());
        return EXIT_USAGE;
    }
    if (!key.n_bytes)
        return usage_error(
            "several nodes need a key, the same on all: set ZERO_JOB_KEY or ZERO_JOB_KEY_FILE");
    for (int i = 0; i < key.n_bytes; i++)
        snprintf(o->key + 2 * i, 3, "%02x", key.bytes[i]);
    return 0;
}

/* Checks the options together, and fills in defaults. Returns 0 or the exit code. */
static int check_options(struct zr_run_options *o)
{
    if (o->n_ranks == 0)
        return usage_error("how many ranks? -n N is missing");
    if (!o->argv)
        return usage_error("no program to run");
    bool has_meeting_point = o->meet_port || o->meet_file[0];
    if (o->n_nodes == 0 && (o->node >= 0 || has_meeting_point))
        return usage_error("on how many nodes? --nnodes N is missing");
    if (o->n_nodes > 1 && o->node < 0)
        return usage_error("which of %d nodes? --node-rank K is missing", o->n_nodes);
    if (o->n_nodes > 1 && !has_meeting_point)
        return usage_error("where is node 0? --rdzv HOST:PORT is missing");
    o->n_nodes = o->n_nodes ? o->n_nodes : 1;
    o->node = o->node < 0 ? 0 : o->node;
    if (o->node >= o->n_nodes)
        return usage_error("--node-rank is %d; allowed with %d node%s: 0 to %d", o->node, o->n_nodes,
                           o->n_nodes == 1 ? "" : "s", o->n_nodes - 1);
    if (o->n_nodes > 1)
        return take_key(o);
    if (make_key(o->key))
        return 0;
    fprintf(stderr, "zero-run: no random bits for the job's key: %s\n", strerror(errno));
    return 1;
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], ZR_RUN_EXEC))
        return zr_run_exec(argc, argv);

    unsigned opened;
    if (zr_standard_fds_open(&opened)) {
        fprintf(stderr, "zero-run: %s\n", zr_error_text());
        return EXIT_FAILURE;
    }
    if (opened & 1u << STDOUT_FILENO)
        fprintf(stderr, "zero-run: standard output was closed: what ranks write there is dropped\n");
    zr_raise_descriptor_limit(ZR_MANY_DESCRIPTORS); /* ranks inherit it */
    signal(SIGXFSZ, SIG_IGN); /* a write beyond the file size limit then fails with an errno */
    static const struct argp argp = {options, parse_option, "PROGRAM [ARGUMENT...]", doc, NULL, NULL, NULL};
    static char version[32];
    snprintf(version, sizeof version, "zero-run %d.%d.%d", ZERO_VERSION_MAJOR, ZERO_VERSION_MINOR,
             ZERO_VERSION_PATCH);
    argp_program_version = version;
    if (argc > 0)
        argv[0] = (char *)"zero-run"; /* getopt uses it in messages */
    struct zr_run_options o = {.node = -1, .meet_ms = 1000LL * MEET_S, .silent_ms = 1000LL * SILENT_S};
    /* ARGP_IN_ORDER: parsing stops at the program's name, because later options are the program's. */
    if (argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &o))
        return EXIT_USAGE;
    int code = check_options(&o);
    if (code)
        return code;
    char *path = NULL;
    code = zr_run_find(o.argv[0], &path);
    o.path = code ? NULL : path;
    if (!code || o.n_nodes > 1) { /* the other nodes must learn that the program is missing */
        int job_code = zr_run_job(&o);
        code = code ? code : job_code;
    }
    free(path);
    fflush(NULL);
    /* Do not call exit(): libuv would join its worker threads there, and one may be stuck in a write that
     * nobody reads. */
    _exit(code);
}
