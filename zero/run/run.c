/* run.c: zero-run -n N program args...: the command line. */
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

enum { EXIT_USAGE = 2, RANKS_MAX = 4096, RESTARTS_MAX = 1000000 };

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

enum { KEY_RAW = 256, KEY_PORT, KEY_RESTARTS };

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
    case KEY_RESTARTS:
        if (!parse_count(arg, 0, RESTARTS_MAX, &o->limits.restarts))
            exit(usage_error("--restarts is \"%s\"; allowed: 0 to %d", arg, RESTARTS_MAX));
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
    {"port", KEY_PORT, "P", 0, "MASTER_PORT; default: a free one, another one after a restart", 0},
    {"restarts", KEY_RESTARTS, "R", 0,
     "How often all ranks are started again when one has failed; default: 0", 0},
    {0}};

static const char doc[] =
    "Starts N ranks of a program on this machine and waits for them.\v"
    "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT, "
    "ZERO_JOB, ZERO_ATTEMPT and ZERO_JOB_KEY (a random key, by which the ranks know each other) in its "
    "environment, and OMP_NUM_THREADS, the number of cores divided by N, unless that is set already. "
    "Variables of other launchers are removed.\n\n"
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
    "With --restarts R the ranks are then started again, up to R times, with ZERO_ATTEMPT one higher; "
    "nothing "
    "of the ranks before is left by then but their output. The program is to go on from where it last saved. "
    "What it has read of standard input is gone. Not started again is what a signal asked zero-run to end, "
    "and "
    "a program that cannot be run (126, 127).\n\n"
    "Exit code: 0, or that of the rank that failed first (in the last attempt), or 128 + its signal; 127 "
    "when the program is not "
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
        code = zr_run_lead(&o);
    }
    free(path);
    fflush(NULL);
    /* Not exit(): libuv would join its worker threads there, and one may be stuck in a write nobody reads. */
    _exit(code);
}
