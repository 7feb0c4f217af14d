/* run.c: zero-run -n N program args...: the command line, and the environment that makes a process a rank. */
#include "zero/run/run.h"
#include "zero/zero.h"

#include <argp.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { EXIT_USAGE = 2, RANKS_MAX = 4096 };

static int usage_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* One line, however it came to it: argp would add a second. */
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

/* The variables by which a process takes itself for a rank of another launcher, or of an outer zero-run. The
 * first seven are set anew. A name ending in _ stands for all that begin so. */
static const char *const launcher_variables[] = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ZERO_JOB", "ZERO_JOB_KEY",
    /* ours, stronger than RANK */
    "ZERO_RANK", "ZERO_WORLD_SIZE", "ZERO_LOCAL_RANK", "ZERO_RENDEZVOUS", "ZERO_JOB_KEY_FILE",
    /* torchrun's */
    "TORCHELASTIC_", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    /* Open MPI's, MPICH's, Slurm's */
    "OMPI_COMM_WORLD_", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"};

static bool is_launchers(const char *entry)
{
    size_t n_name = strcspn(entry, "=");
    for (size_t i = 0; i < sizeof launcher_variables / sizeof *launcher_variables; i++) {
        const char *name = launcher_variables[i];
        size_t n = strlen(name);
        if (name[n - 1] == '_' ? n_name > n && !memcmp(entry, name, n)
                               : n_name == n && !memcmp(entry, name, n))
            return true;
    }
    return false;
}

char **zr_run_environment(const struct zr_run_options *o, int rank, int port, const char *job)
{
    enum { N_NEW = 9, NEW_BYTES = 160 };
    /* Their terminals are pipes to a file or a program: not a place for colours and moving cursors. */
    bool plain = !o->raw && !isatty(STDOUT_FILENO);
    size_t n = 0, k = 0;
    while (environ[n])
        n++;
    char **env = malloc((n + N_NEW + 1) * sizeof *env + (size_t)N_NEW * NEW_BYTES);
    if (!env)
        return NULL;
    for (size_t i = 0; i < n; i++)
        if (!is_launchers(environ[i]) && !(plain && !strncmp(environ[i], "TERM=", 5)))
            env[k++] = environ[i];

    char *text = (char *)(env + n + N_NEW + 1);
#define ADD(...)                                                                                             \
    do {                                                                                                     \
        snprintf(text, NEW_BYTES, __VA_ARGS__);                                                              \
        env[k++] = text;                                                                                     \
        text += NEW_BYTES;                                                                                   \
    } while (0)
    ADD("RANK=%d", rank);
    ADD("WORLD_SIZE=%d", o->n_ranks);
    ADD("LOCAL_RANK=%d", rank);
    ADD("MASTER_ADDR=127.0.0.1");
    ADD("MASTER_PORT=%d", port);
    ADD("ZERO_JOB=%s", job);
    ADD("ZERO_JOB_KEY=%s", o->key);
    if (plain)
        ADD("TERM=dumb");
    if (!getenv("OMP_NUM_THREADS")) {
        int each = (int)uv_available_parallelism() / o->n_ranks;
        ADD("OMP_NUM_THREADS=%d", each > 1 ? each : 1);
    }
#undef ADD
    env[k] = NULL;
    return env;
}

/* 128 random bits as hex digits. Only the ranks' environment holds them: a command line is seen by all. */
static bool make_key(char key[ZR_RUN_KEY_CHARS])
{
    unsigned char bytes[(ZR_RUN_KEY_CHARS - 1) / 2];
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

enum { KEY_RAW = 256, KEY_PORT };

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    struct zr_run_options *o = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->err_stream = NULL; /* getopt has said it in one line; argp would only add where help is */
        break;
    case 'n':
        if (!parse_count(arg, 1, RANKS_MAX, &o->n_ranks))
            exit(usage_error("-n is \"%s\"; allowed: 1 to %d", arg, RANKS_MAX));
        break;
    case KEY_RAW:
        o->raw = true;
        break;
    case KEY_PORT:
        if (!parse_count(arg, 1, 65535, &o->port))
            exit(usage_error("--port is \"%s\"; allowed: 1 to 65535", arg));
        break;
    case ARGP_KEY_ARGS:
        o->argv = state->argv + state->next;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static const struct argp_option options[] = {
    {"ranks", 'n', "N", 0, "How many ranks to start", 0},
    {"raw", KEY_RAW, NULL, 0, "Ranks write to the terminal or file themselves, without prefix", 0},
    {"port", KEY_PORT, "P", 0, "MASTER_PORT; default: a free one", 0},
    {0}};

static const char doc[] =
    "Starts N ranks of a program on this machine and waits for them.\v"
    "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ZERO_JOB and ZERO_JOB_KEY "
    "(a random key, by which the ranks know each other) in its environment, and OMP_NUM_THREADS, the number "
    "of cores divided by N, unless that is set already. Variables of other "
    "launchers are "
    "removed.\n\n"
    "Output comes line by line, as it is written, with \"[rank] \" before it (lines above 1 MiB in pieces). "
    "For that a rank's standard output is a pseudo-terminal; TERM is dumb where zero-run's own is not a "
    "terminal. With --raw, or when pseudo-terminals run out, a program may hold lines back until it ends. "
    "Standard input goes to rank 0.\n\n"
    "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded to every rank, which leads a session and "
    "process group of "
    "its own; a second SIGINT, SIGTERM or SIGHUP ends the ranks as a failure does, a third one at once. The "
    "first rank "
    "that fails ends all: the others get SIGTERM, and SIGKILL 2 s later. If zero-run itself is killed, even "
    "by SIGKILL, "
    "every rank is (but not what the ranks have started).\n\n"
    "Exit code: 0, or that of the rank that failed first, or 128 + its signal; 127 when the program is not "
    "found, "
    "126 when it cannot be run, 2 for a bad command line, 141 when nobody reads the output any more.";

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], ZR_RUN_EXEC))
        return zr_run_exec(argc, argv);

    static const struct argp argp = {options, parse_option, "PROGRAM [ARGUMENT...]", doc, NULL, NULL, NULL};
    static char version[32];
    snprintf(version, sizeof version, "zero-run %d.%d.%d", ZERO_VERSION_MAJOR, ZERO_VERSION_MINOR,
             ZERO_VERSION_PATCH);
    argp_program_version = version;
    if (argc > 0)
        argv[0] = (char *)"zero-run"; /* getopt names it in its messages */
    struct zr_run_options o = {0};
    /* In order: the program's own options are not ours. */
    if (argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &o))
        return EXIT_USAGE;
    if (o.n_ranks == 0)
        return usage_error("how many ranks? -n N is missing");
    if (!o.argv)
        return usage_error("no program to run");
    if (!make_key(o.key)) {
        fprintf(stderr, "zero-run: no random bits for the job's key: %s\n", strerror(errno));
        return 1;
    }
    char *path = NULL;
    int code = zr_run_find(o.argv[0], &path);
    if (!code) {
        o.path = path;
        code = zr_run_ranks(&o);
    }
    free(path);
    fflush(NULL);
    /* Not exit(): libuv would join its worker threads there, and one may be stuck in a write nobody reads. */
    _exit(code);
}
